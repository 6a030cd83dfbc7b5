// SPDX-License-Identifier: Apache-2.0
#include "support/run_backend.h"

#include <optional>

namespace fovea::test {

BackendRequest request_of(const AttentionCase& test, int threads) {
  BackendRequest request = {test.spec, complete_cache(test), limits_of(test), cpu_device()};
  request.device.cores = threads;
  return request;
}

BackendUnderTest::BackendUnderTest(const BackendEntry& entry, const AttentionCase& test,
                                   PagedStore* store, ThreadPool& threads, Fill fill)
    : workspace_(entry.workspace_bytes(request_of(test, threads.size())), fill) {
  BackendContext context;
  context.spec = test.spec;
  context.kv = store ? &store->pool() : nullptr;
  context.threads = &threads;
  backend_ = entry.create(context);
  backend_->reserve(limits_of(test), workspace_.bytes());
}

void BackendUnderTest::run(PackedBatch& batch) {
  backend_->plan(batch.view());
  backend_->forward(batch.tensors());
}

std::vector<Output> run_batches(const BackendEntry& entry, const AttentionCase& test,
                                const CaseData& data,
                                const std::vector<std::vector<Piece>>& batches,
                                const RunOptions& options) {
  ThreadPool threads(options.threads);
  std::optional<PagedStore> store;
  if (is_cached(test.spec)) store.emplace(test, data, options.fill);
  PagedStore* pages = store ? &*store : nullptr;
  BackendUnderTest under_test(entry, test, pages, threads, options.fill);
  std::vector<Output> outputs;
  for (const std::vector<Piece>& pieces : batches) {
    PackedBatch batch(test, data, pages, pieces, options.fill);
    under_test.run(batch);
    outputs.push_back(batch.output());
    EXPECT_TRUE(batch.untouched_outside()) << "rows of no token were written";
  }
  EXPECT_TRUE(under_test.guards_intact());
  if (store && test.page_stride == 0 && options.fill == Fill::poison) {
    const PagedStore want(test, data, options.fill, Written::all);
    EXPECT_TRUE(store->pool().same_content(want.pool()))
        << "the cache does not hold exactly the case's tokens";
  }
  return outputs;
}

Output run_case(const BackendEntry& entry, const AttentionCase& test, const CaseData& data,
                const RunOptions& options) {
  return run_batches(entry, test, data, {whole_case(test)}, options).front();
}

}  // namespace fovea::test
