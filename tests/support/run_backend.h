// SPDX-License-Identifier: Apache-2.0
// A backend under test in a guarded workspace of exactly workspace_bytes().
#pragma once

#include <memory>
#include <vector>

#include "fovea/select_backend.h"
#include "support/device_mirror.h"
#include "support/packed_batch.h"
#include "support/paged_store.h"

namespace fovea::test {

BackendRequest request_of(const AttentionCase& test, int threads = 1);
// Returns true if the backend accepts the case of this name.
bool serves(const BackendEntry& entry, const char* name);
// Returns the softmax backends of the test device if it is a GPU, else none.
std::vector<BackendEntry> gpu_backends();

class BackendUnderTest {
 public:
  // `store` is null for uncached cases. The limits are those of the case. On a GPU the store gets a
  // copy there.
  BackendUnderTest(const BackendEntry& entry, const AttentionCase& test, PagedStore* store,
                   ThreadPool& threads, Fill fill = Fill::zero);

  AttentionBackend& backend() { return *backend_; }
  // Plans and runs the batch; on a GPU, on a copy there. Afterwards the batch has the outputs and
  // the store the cache.
  void run(PackedBatch& batch);
  // On a GPU: captures the first batch, then replays the graph with the contents of each batch.
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

// Runs a whole problem: every list of pieces is one batch, and all run in order over one store.
// Returns the outputs of the batches.
struct RunOptions {
  Fill fill = Fill::zero;
  int threads = 2;
  Tables tables = Tables::slots;
};
std::vector<Output> run_batches(const BackendEntry& entry, const AttentionCase& test,
                                const CaseData& data,
                                const std::vector<std::vector<Piece>>& batches,
                                const RunOptions& options = {});

// Runs the whole case as one batch.
Output run_case(const BackendEntry& entry, const AttentionCase& test, const CaseData& data,
                const RunOptions& options = {});

}  // namespace fovea::test
