// SPDX-License-Identifier: Apache-2.0
// A backend under test: created, reserved in a guarded workspace of exactly the promised size.
#pragma once

#include <memory>
#include <vector>

#include "fovea/select_backend.h"
#include "support/device_mirror.h"
#include "support/packed_batch.h"
#include "support/paged_store.h"

namespace fovea::test {

BackendRequest request_of(const AttentionCase& test, int threads = 1);
// Whether it takes the case of cases.h of this name.
bool serves(const BackendEntry& entry, const char* name);
// The backends of softmax attention that run on the test device if that is a GPU, else none.
std::vector<BackendEntry> gpu_backends();

class BackendUnderTest {
 public:
  // `store` is null for uncached cases. The limits are those of the case. On a GPU the store has a
  // twin there from now on.
  BackendUnderTest(const BackendEntry& entry, const AttentionCase& test, PagedStore* store,
                   ThreadPool& threads, Fill fill = Fill::zero);

  AttentionBackend& backend() { return *backend_; }
  // On a GPU the batch has a twin there while it runs. Outputs are in the batch afterwards, the
  // cache in the store.
  void run(PackedBatch& batch);
  // On a GPU: captures the first batch, then replays that graph on the contents of each.
  void replay(const std::vector<PackedBatch*>& batches);
  ::testing::AssertionResult guards_intact() const;

 private:
  GuardedBuffer workspace_;
  PagedStore* store_;
  std::unique_ptr<gpu::Context> gpu_;
  std::unique_ptr<DeviceMirror> device_workspace_;
  std::unique_ptr<DevicePool> device_pool_;
  std::unique_ptr<gpu::OwnedStream> stream_;
  std::unique_ptr<AttentionBackend> backend_;
};

// One problem from nothing to its output: every piece list is one batch, run in order over one
// store. Returns the outputs of the batches.
struct RunOptions {
  Fill fill = Fill::zero;
  int threads = 2;
  Tables tables = Tables::slots;
};
std::vector<Output> run_batches(const BackendEntry& entry, const AttentionCase& test,
                                const CaseData& data,
                                const std::vector<std::vector<Piece>>& batches,
                                const RunOptions& options = {});

// The whole case as one batch.
Output run_case(const BackendEntry& entry, const AttentionCase& test, const CaseData& data,
                const RunOptions& options = {});

}  // namespace fovea::test
