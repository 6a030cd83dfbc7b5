// SPDX-License-Identifier: Apache-2.0
// Buffers, copies, events and captured graphs of src/gpu. Skipped without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/gpu.h"
#include "fovea/kv_cache.h"
#include "gpu/gpu.h"
#include "support/expect_error.h"

namespace fovea::gpu {
namespace {

class Runtime : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
    context_ = std::make_unique<Context>(0);
  }
  std::unique_ptr<Context> context_;
};

std::vector<int> counted(size_t count) {
  std::vector<int> values(count);
  std::iota(values.begin(), values.end(), 1);
  return values;
}

TEST_F(Runtime, PinnedMemoryGoesThereAndBack) {
  constexpr size_t kCount = 1 << 20;
  const OwnedStream stream;
  const PinnedBuffer from(kCount * sizeof(int)), to(kCount * sizeof(int));
  const DeviceBuffer there(kCount * sizeof(int));
  const std::vector<int> values = counted(kCount);
  std::copy(values.begin(), values.end(), from.data<int>());
  std::memset(to.data(), 0, to.bytes());
  copy_to_device(there.data(), from.data(), from.bytes(), stream.get());
  copy_to_host(to.data(), there.data(), to.bytes(), stream.get());
  synchronize(stream.get());
  EXPECT_TRUE(std::equal(values.begin(), values.end(), to.data<int>()));
}

TEST_F(Runtime, BuffersAreAlignedAndMove) {
  DeviceBuffer buffer(1000);
  void* const address = buffer.data();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(address) % 256, 0u);
  DeviceBuffer moved = std::move(buffer);
  EXPECT_EQ(moved.data(), address);
  EXPECT_EQ(moved.bytes(), 1000u);
  EXPECT_EQ(DeviceBuffer().data(), nullptr);
}

TEST_F(Runtime, RefusedCallsAreDeviceFailures) {
  int value = 0;
  test::expect_error(ErrorCode::device_failure, "cuMemcpy",
                     [&] { copy_to_host(&value, nullptr, sizeof(value), nullptr); });
}

TEST_F(Runtime, EventsTakeTimeInOrder) {
  const OwnedStream stream;
  const DeviceBuffer buffer(1 << 26);
  Event start, end;
  start.record(stream.get());
  fill_bytes(buffer.data(), 1, buffer.bytes(), stream.get());
  end.record(stream.get());
  end.wait();
  EXPECT_GT(end.milliseconds_since(start), 0.0f);
}

TEST_F(Runtime, GraphsReplayWhatWasCaptured) {
  const OwnedStream stream;
  const DeviceBuffer from(400), to(400);
  Graph graph = Graph::capture(stream.get(), [&](Stream captured) {
    check(driver().copy_on_device(reinterpret_cast<CUdeviceptr>(to.data()),
                                  reinterpret_cast<CUdeviceptr>(from.data()), 400, captured),
          "cuMemcpyDtoDAsync");
  });
  const Graph moved = std::move(graph);
  for (const int first : {1, 7}) {
    std::vector<int> values = counted(100), got(100);
    values[0] = first;
    copy_to_device(from.data(), values.data(), 400, stream.get());
    moved.launch(stream.get());
    copy_to_host(got.data(), to.data(), 400, stream.get());
    synchronize(stream.get());
    EXPECT_EQ(got, values);
  }
}

// An allocation that does not fit is an error that says how much was wanted, and the next one
// works.
TEST_F(Runtime, MoreMemoryThanThereIsIsNamed) {
  const size_t bytes = 2 * context_->info().memory_bytes;
  const auto expect_named = [&](const char* what, const std::function<void()>& allocate) {
    SCOPED_TRACE(what);
    test::expect_error(ErrorCode::out_of_memory, "are free", allocate);
  };
  expect_named("buffer", [&] { const DeviceBuffer buffer(bytes); });
  const KvCacheSpec spec = {.dtype = DType::bf16,
                            .layers = 1,
                            .kv_heads = 8,
                            .head_dim = 128,
                            .head_dim_v = 128,
                            .page_size = 64};
  const auto pages = static_cast<int64_t>(bytes / kv_pool_bytes(spec, 1));
  expect_named("pool", [&] { make_kv_pool(spec, pages, context_->info().device()); });
  EXPECT_NE(DeviceBuffer(1 << 20).data(), nullptr);
}

// An exception inside a capture ends the capture, and the stream stays usable.
TEST_F(Runtime, AbandonedCapturesLeaveTheStreamUsable) {
  const OwnedStream stream;
  const DeviceBuffer buffer(4);
  EXPECT_THROW(
      Graph::capture(stream.get(), [](Stream) { throw std::runtime_error("while capturing"); }),
      std::runtime_error);
  const int value = 5;
  int got = 0;
  copy_to_device(buffer.data(), &value, 4, stream.get());
  copy_to_host(&got, buffer.data(), 4, stream.get());
  synchronize(stream.get());
  EXPECT_EQ(got, 5);
}

TEST_F(Runtime, DevicesThatDoNotExistAreNamed) {
  const int count = static_cast<int>(gpu_devices().size());
  for (const int index : {-1, count}) {
    test::expect_invalid(std::to_string(index), [&] { const Context context(index); });
  }
  EXPECT_THROW(find_device("cuda:" + std::to_string(count)), Error);
  EXPECT_EQ(find_device("cuda").sm, context_->info().sm);
}

}  // namespace
}  // namespace fovea::gpu
