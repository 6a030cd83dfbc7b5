// SPDX-License-Identifier: Apache-2.0
#include "support/run_backend.h"

#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>

#include "support/cases.h"
#include "support/test_device.h"

namespace fovea::test {
namespace {

// FNV-1a over the bits of every value.
uint64_t digest(const Output& output) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const std::vector<float>* values : {&output.out, &output.lse}) {
    for (float value : *values) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      hash = (hash ^ bits) * 0x100000001b3;
    }
  }
  return hash;
}

// With FOVEA_OUTPUT_DIGESTS=FILE every batch adds a line to FILE: its test and a digest of its
// outputs. Two builds whose lines are equal compute the same bits.
void record(const Output& output, size_t batch) {
  const char* path = std::getenv("FOVEA_OUTPUT_DIGESTS");
  if (path == nullptr) return;
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  std::ofstream(path, std::ios::app) << fmt::format("{}.{} {} {:016x}\n", test->test_suite_name(),
                                                    test->name(), batch, digest(output));
}

}  // namespace

BackendRequest request_of(const AttentionCase& test, int threads) {
  BackendRequest request = {test.spec, complete_cache(test), limits_of(test), test_device()};
  if (!on_gpu()) request.device.cores = threads;
  return request;
}

bool serves(const BackendEntry& entry, const char* name) {
  return entry.reject(request_of(attention_case(name))).empty();
}

std::vector<BackendEntry> gpu_backends() {
  std::vector<BackendEntry> list;
  if (!on_gpu() || !why_no_test_device().empty()) return list;
  const BackendRegistry registry = BackendRegistry::builtin();
  for (const BackendEntry& entry : registry.entries()) {
    if (serves(entry, "mixed") || serves(entry, "mla_page_16")) list.push_back(entry);
  }
  return list;
}

BackendUnderTest::BackendUnderTest(const BackendEntry& entry, const AttentionCase& test,
                                   PagedStore* store, ThreadPool& threads, Fill fill)
    : workspace_(entry.workspace_bytes(request_of(test, threads.size())), fill), store_(store) {
  BackendContext context;
  context.spec = test.spec;
  context.device = test_device().device();
  std::span<std::byte> workspace = workspace_.bytes();
  if (on_gpu()) {
    gpu_ = std::make_unique<gpu::Context>(context.device.index);
    stream_ = std::make_unique<gpu::OwnedStream>();
    device_workspace_ = std::make_unique<DeviceMirror>(HostBlocks{workspace});
    workspace = {device_workspace_->translate(workspace.data()), workspace.size()};
    if (store) device_pool_ = std::make_unique<DevicePool>(store->pool());
    context.kv = device_pool_.get();
  } else {
    context.kv = store ? &store->pool() : nullptr;
    context.threads = &threads;
  }
  backend_ = entry.create(context);
  backend_->reserve(limits_of(test), workspace);
}

void BackendUnderTest::run(PackedBatch& batch) {
  if (!on_gpu()) {
    backend_->plan(batch.view());
    backend_->forward(batch.tensors());
    return;
  }
  const DeviceBatch twin(batch, store_);
  backend_->plan(twin.view(), stream_->get());
  backend_->forward(twin.tensors(), stream_->get());
  gpu::synchronize(stream_->get());
  twin.download(batch);
  EXPECT_TRUE(twin.guards_intact());
  if (device_pool_) device_pool_->download();
}

void BackendUnderTest::replay(const std::vector<PackedBatch*>& batches) {
  const DeviceBatch twin(*batches.front(), store_);
  const gpu::Graph graph = gpu::Graph::capture(stream_->get(), [&](Stream stream) {
    backend_->plan(twin.view(), stream);
    backend_->forward(twin.tensors(), stream);
  });
  for (PackedBatch* batch : batches) {
    twin.upload(*batch);
    graph.launch(stream_->get());
    gpu::synchronize(stream_->get());
    twin.download(*batch);
  }
  EXPECT_TRUE(twin.guards_intact());
}

::testing::AssertionResult BackendUnderTest::guards_intact() const {
  if (!on_gpu()) return workspace_.guards_intact();
  auto result = device_workspace_->guards_intact();
  if (result && device_pool_) result = device_pool_->guards_intact();
  return result;
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
    batch.give(options.tables);
    const std::vector<std::byte> inputs = batch.inputs();
    under_test.run(batch);
    outputs.push_back(batch.output());
    record(outputs.back(), outputs.size() - 1);
    EXPECT_TRUE(batch.inputs() == inputs) << "what was handed in is not as it was";
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
