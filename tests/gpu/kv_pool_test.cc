// SPDX-License-Identifier: Apache-2.0
// Pools in GPU memory: they start with zeros and scales of 1, and publish slot maps in stream
// order. Skipped without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "fovea/gpu.h"
#include "fovea/kv_cache.h"
#include "gpu/gpu.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

constexpr Device kGpu = {DeviceKind::cuda, 0};

class GpuPool : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
  }
  template <typename T>
  static std::vector<T> read(const T* from, size_t count) {
    std::vector<T> values(count);
    gpu::copy_to_host(values.data(), from, count * sizeof(T), nullptr);
    gpu::synchronize(nullptr);
    return values;
  }
};

KvCacheSpec spec_with(DType dtype, KvScale scale) {
  return {.dtype = dtype,
          .scale = scale,
          .layers = 3,
          .kv_heads = 2,
          .head_dim = 64,
          .head_dim_v = 64,
          .page_size = 4};
}

TEST_F(GpuPool, IsZeroedAndLiesAsOnTheCpu) {
  const KvCacheSpec spec = spec_with(DType::bf16, KvScale::none);
  const auto pool = make_kv_pool(spec, 5, kGpu), twin = make_kv_pool(spec, 5);
  EXPECT_EQ(pool->device(), kGpu);
  EXPECT_EQ(twin->device(), Device{});
  const KvLayerView first = pool->layer(0), cpu_first = twin->layer(0);
  for (int32_t layer = 0; layer < 3; ++layer) {
    const KvLayerView view = pool->layer(layer), want = twin->layer(layer);
    EXPECT_EQ(view.k - first.k, want.k - cpu_first.k);
    EXPECT_EQ(view.v - view.k, want.v - want.k);
    EXPECT_EQ(view.k_page_stride, want.k_page_stride);
    for (const char* side : {view.k, view.v}) {
      const std::vector<char> bytes = read(side, 5 * 4 * 2 * 64 * 2);
      EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0; }));
    }
  }
}

TEST_F(GpuPool, GivenScalesStartAtOne) {
  for (const KvScale scale : {KvScale::per_tensor, KvScale::per_head}) {
    const auto pool = make_kv_pool(spec_with(DType::f8e4m3, scale), 3, kGpu);
    const size_t count = scale == KvScale::per_tensor ? 1 : 2;
    for (int32_t layer = 0; layer < 3; ++layer) {
      EXPECT_EQ(read(pool->layer(layer).k_scale, count), std::vector<float>(count, 1.0f));
      EXPECT_EQ(read(pool->layer(layer).v_scale, count), std::vector<float>(count, 1.0f));
    }
  }
}

TEST_F(GpuPool, TooLargeNamesTheBytes) {
  KvCacheSpec spec = spec_with(DType::bf16, KvScale::none);
  spec.page_size = 256;
  const int64_t pages = int64_t{1} << 22;
  test::expect_error(ErrorCode::out_of_memory, std::to_string(kv_pool_bytes(spec, pages)),
                     [&] { make_kv_pool(spec, pages, kGpu); });
  // The failed allocation left the device usable.
  EXPECT_NO_THROW(make_kv_pool(spec, 2, kGpu));
}

TEST_F(GpuPool, PublishedSlotMapsAreThoseOfTheHost) {
  KvCacheSpec spec = spec_with(DType::bf16, KvScale::none);
  spec.window = 8;
  const auto pool = make_window_kv_pool(spec, 5, 40, kGpu);
  const auto on_device = [&] { return read(pool->device_slot_map(), 40); };
  const auto on_host = [&] {
    return std::vector<int64_t>(pool->slot_map().begin(), pool->slot_map().end());
  };
  EXPECT_EQ(on_device(), on_host());
  const std::vector<int64_t> slots = {8, 9, 10, 32, 33};
  ASSERT_TRUE(pool->map(slots));
  EXPECT_NE(on_device(), on_host());
  pool->publish(nullptr);
  EXPECT_EQ(on_device(), on_host());
  pool->unmap(std::vector<int64_t>{9, 33});
  pool->publish(nullptr);
  pool->publish(nullptr);
  EXPECT_EQ(on_device(), on_host());
}

// allocate() and copy() take effect in their order when they are published, after earlier work of
// the stream.
TEST_F(GpuPool, StatesChangeWhenTheyArePublished) {
  const StateCacheSpec spec{
      .layers = 2, .conv_dim = 3, .conv_width = 3, .heads = 2, .rows = 3, .columns = 4};
  const auto pool = make_state_pool(spec, 4, kGpu);
  EXPECT_EQ(pool->device(), kGpu);
  const gpu::OwnedStream stream;
  const auto write = [&](int32_t slot, float value) {
    for (int32_t i = 0; i < spec.layers; ++i) {
      const StateLayerView view = pool->layer(i);
      const float offset = value + static_cast<float>(i) / 2;
      gpu::fill_floats(view.conv + slot * view.conv_slot_stride, offset, 6, stream.get());
      gpu::fill_floats(view.state_as<float>() + slot * view.state_slot_stride, offset, 24,
                       stream.get());
    }
  };
  const auto expect = [&](int32_t slot, float value, bool zero = false) {
    gpu::synchronize(stream.get());
    for (int32_t i = 0; i < spec.layers; ++i) {
      const StateLayerView view = pool->layer(i);
      const float want = zero ? 0 : value + static_cast<float>(i) / 2;
      EXPECT_EQ(read(view.conv + slot * view.conv_slot_stride, 6), std::vector<float>(6, want));
      EXPECT_EQ(read(view.state_as<float>() + slot * view.state_slot_stride, 24),
                std::vector<float>(24, want));
    }
  };
  const int32_t a = pool->allocate().value(), b = pool->allocate().value();
  expect(a, 0, true);
  write(a, 3);
  write(b, 5);
  pool->copy(a, b);
  expect(b, 5);  // not yet
  pool->publish(stream.get());
  expect(a, 3);
  expect(b, 3);
  // A slot that is used again becomes zeros, or at once a copy.
  pool->release(a);
  const int32_t again = pool->allocate().value(), c = pool->allocate().value();
  EXPECT_EQ(again, a);
  write(c, 7);
  pool->copy(b, c);
  pool->publish(stream.get());
  expect(a, 0, true);
  expect(c, 3);
  write(b, 9);
  pool->release(a);
  EXPECT_EQ(pool->allocate(), a);
  pool->copy(b, a);
  pool->publish(stream.get());
  expect(a, 9);
  expect(c, 3);
  pool->publish(stream.get());  // nothing is left
  expect(a, 9);
}

}  // namespace
}  // namespace fovea
