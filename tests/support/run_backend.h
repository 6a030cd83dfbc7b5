// SPDX-License-Identifier: Apache-2.0
// A backend under test: created, reserved in a guarded workspace of exactly the promised size.
#pragma once

#include <memory>
#include <vector>

#include "fovea/select_backend.h"
#include "support/packed_batch.h"
#include "support/paged_store.h"

namespace fovea::test {

BackendRequest request_of(const AttentionCase& test, int threads = 1);

class BackendUnderTest {
 public:
  // `store` is null for uncached cases. The limits are those of the case.
  BackendUnderTest(const BackendEntry& entry, const AttentionCase& test, PagedStore* store,
                   ThreadPool& threads, Fill fill = Fill::zero);

  AttentionBackend& backend() { return *backend_; }
  void run(PackedBatch& batch);
  ::testing::AssertionResult guards_intact() const { return workspace_.guards_intact(); }

 private:
  GuardedBuffer workspace_;
  std::unique_ptr<AttentionBackend> backend_;
};

// One problem from nothing to its output: every piece list is one batch, run in order over one
// store. Returns the outputs of the batches.
struct RunOptions {
  Fill fill = Fill::zero;
  int threads = 2;
};
std::vector<Output> run_batches(const BackendEntry& entry, const AttentionCase& test,
                                const CaseData& data,
                                const std::vector<std::vector<Piece>>& batches,
                                const RunOptions& options = {});

// The whole case as one batch.
Output run_case(const BackendEntry& entry, const AttentionCase& test, const CaseData& data,
                const RunOptions& options = {});

}  // namespace fovea::test
