// SPDX-License-Identifier: Apache-2.0
// Edge cases of storing keys and values. reference_attention_test checks whole caches in every
// format.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/float_types.h"
#include "kernels/reference/reference.h"

namespace fovea {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kPageSize = 2;
constexpr int32_t kSlots = 8;
constexpr int32_t kDim = 4;

// A cache of one head and `row_elements` per slot, filled with 0x5a.
struct Cache {
  Cache(KvLayout layout, DType dtype, KvScale scale, int32_t row_elements)
      : k(static_cast<size_t>(kSlots * row_elements) * dtype_bytes(dtype), 0x5a), v(k) {
    view.layout = layout;
    view.dtype = dtype;
    view.scale = scale;
    view.page_size = kPageSize;
    view.slots = kSlots;
    view.k = k.data();
    view.v = layout == KvLayout::mha ? v.data() : k.data();
    view.k_page_stride = view.v_page_stride = kPageSize * row_elements;
    view.k_token_stride = view.v_token_stride = row_elements;
    view.k_head_stride = view.v_head_stride = row_elements;
    if (scale != KvScale::none) view.k_scale = k_scale.data();
    if (scale != KvScale::none) view.v_scale = v_scale.data();
  }

  float k_value(int64_t slot, int32_t d) const {
    return load_float(k_address(view, slot, 0), view.dtype, d);
  }
  bool untouched(int64_t slot) const {
    const size_t row = k.size() / kSlots;
    return std::all_of(k.begin() + slot * row, k.begin() + (slot + 1) * row,
                       [](char byte) { return byte == 0x5a; });
  }

  std::vector<char> k, v;
  std::vector<float> k_scale = std::vector<float>(kSlots, -1);
  std::vector<float> v_scale = std::vector<float>(kSlots, -1);
  KvLayerView view;
};

void write(Cache& cache, std::vector<float> k, const std::vector<int64_t>& slots,
           const int64_t* slot_map = nullptr) {
  std::vector<float> v(k.size(), 1);
  kernels::KvWriteParams params;
  params.cache = cache.view;
  params.k = dense_rows(k.data(), DType::f32, 1, kDim);
  params.v = dense_rows(v.data(), DType::f32, 1, kDim);
  params.slots = slots.data();
  params.slot_map = slot_map;
  params.tokens = static_cast<int32_t>(slots.size());
  params.kv_heads = 1;
  params.head_dim = params.head_dim_v = kDim;
  kernels::reference::kv_write(params);
}

TEST(ReferenceKvWrite, SkipsNegativeAndUnmappedSlots) {
  Cache cache(KvLayout::mha, DType::f32, KvScale::none, kDim);
  const std::vector<int64_t> map = {0, 1, 7, -1, -1, -1, -1, 2};
  write(cache, {1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3}, {-1, 2, 3}, map.data());
  EXPECT_EQ(cache.k_value(7, 0), 2);
  for (int64_t slot = 0; slot < 7; ++slot) EXPECT_TRUE(cache.untouched(slot)) << slot;
}

TEST(ReferenceKvWrite, Fp8SaturatesAndKeepsNan) {
  Cache cache(KvLayout::mha, DType::f8e4m3, KvScale::per_tensor, kDim);
  cache.k_scale[0] = 0.5f;
  cache.v_scale[0] = 1;
  write(cache, {1000, -kInfinity, kNan, 3}, {3});
  EXPECT_EQ(cache.k_value(3, 0), 448);
  EXPECT_EQ(cache.k_value(3, 1), -448);
  EXPECT_TRUE(std::isnan(cache.k_value(3, 2)));
  EXPECT_EQ(cache.k_value(3, 3), 6);
}

TEST(ReferenceKvWrite, OwnScaleComesFromFiniteValues) {
  Cache cache(KvLayout::mha, DType::f8e4m3, KvScale::per_token_head, kDim);
  write(cache, {56, -7, kInfinity, kNan}, {5});
  EXPECT_EQ(cache.k_scale[5], 0.125f);
  EXPECT_EQ(cache.k_value(5, 0), 448);
  EXPECT_EQ(cache.k_value(5, 1), -56);
  EXPECT_EQ(cache.k_value(5, 2), 448);
  EXPECT_TRUE(std::isnan(cache.k_value(5, 3)));
}

TEST(ReferenceKvWrite, RowsOfNothingHaveScaleOne) {
  Cache cache(KvLayout::mha, DType::f8e4m3, KvScale::per_token_head, kDim);
  const float tiny = std::numeric_limits<float>::denorm_min();
  write(cache, {0, 0, -0.0f, 0, tiny, tiny, -tiny, 0}, {4, 5});
  for (int64_t slot : {4, 5}) {
    EXPECT_EQ(cache.k_scale[static_cast<size_t>(slot)], 1);
    for (int32_t d = 0; d < kDim; ++d) EXPECT_EQ(cache.k_value(slot, d), 0);
  }
}

// Padding is written to page 0 and read by padded rows, so everything in page 0 must stay finite.
TEST(ReferenceKvWrite, PageZeroStaysFinite) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2}) {
    for (KvScale scale : {KvScale::none, KvScale::per_token_head}) {
      Cache cache(KvLayout::mha, dtype, scale, kDim);
      const float huge = std::numeric_limits<float>::max();
      write(cache, {kNan, kInfinity, -kInfinity, 1, huge, -huge, kNan, 0}, {0, 1});
      for (int64_t slot : {0, 1}) {
        for (int32_t d = 0; d < kDim; ++d) {
          EXPECT_TRUE(std::isfinite(cache.k_value(slot, d)))
              << dtype_name(dtype) << " slot " << slot << " dim " << d;
        }
        EXPECT_TRUE(std::isfinite(cache.k_scale[static_cast<size_t>(slot)]));
      }
      EXPECT_EQ(cache.k_value(0, 0), 0);
    }
  }
}

// A row has 512 codes, four scales and 64 rotary values in bf16: 656 bytes. The rotary part is
// never quantized.
TEST(ReferenceKvWrite, MlaFp8RowsAreLaidOutAsDocumented) {
  Cache cache(KvLayout::mla_fp8_rows, DType::f8e4m3, KvScale::none, 656);
  std::vector<float> latent(512), rope(64);
  for (size_t i = 0; i < latent.size(); ++i) {
    latent[i] = (i % 128 == 5 ? 1.0f : 0.5f) * static_cast<float>(1 + i / 128) * 448;
  }
  for (size_t i = 0; i < rope.size(); ++i) rope[i] = 1 + static_cast<float>(i) / 64;
  const int64_t slot = 6;
  kernels::KvWriteParams params;
  params.cache = cache.view;
  params.k = dense_rows(latent.data(), DType::f32, 1, 512);
  params.v = dense_rows(rope.data(), DType::f32, 1, 64);
  params.slots = &slot;
  params.tokens = params.kv_heads = 1;
  params.head_dim = 512;
  params.head_dim_v = 64;
  kernels::reference::kv_write(params);

  const char* row = cache.k.data() + 6 * 656;
  for (int64_t group = 0; group < 4; ++group) {
    EXPECT_EQ(load_float(row + 512, DType::f32, group), static_cast<float>(1 + group));
    EXPECT_EQ(load_float(row, DType::f8e4m3, group * 128 + 5), 448);
    EXPECT_EQ(load_float(row, DType::f8e4m3, group * 128 + 6), 224);
  }
  for (int64_t i = 0; i < 64; ++i) {
    EXPECT_EQ(load_float(row + 528, DType::bf16, i), rope[static_cast<size_t>(i)]);
  }
  EXPECT_TRUE(cache.untouched(5));
  EXPECT_TRUE(cache.untouched(7));
}

}  // namespace
}  // namespace fovea
