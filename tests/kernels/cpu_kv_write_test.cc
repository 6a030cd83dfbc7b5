// SPDX-License-Identifier: Apache-2.0
// The fast cache write stores the same bytes as the reference for every layout, and changes nothing
// else.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "fovea/error.h"
#include "kernels/cpu/cpu.h"
#include "kernels/kv_write.h"
#include "kernels/reference/reference.h"
#include "support/isas.h"

namespace fovea::kernels {
namespace {

using test::isas;

struct Format {
  KvLayout layout = KvLayout::mha;
  KvOrder order = KvOrder::nhd;
  DType dtype = DType::f32;
  KvScale scale = KvScale::none;
  DType source = DType::f32;
  int32_t kv_heads = 2;
  int32_t dim = 37, dim_v = 21;
  int32_t page_size = 3;
};

std::string describe(const Format& format) {
  return std::string(dtype_name(format.source)) + " to " + std::string(dtype_name(format.dtype)) +
         ", layout " + std::to_string(static_cast<int>(format.layout)) + ", scale " +
         std::to_string(static_cast<int>(format.scale)) + ", order " +
         std::to_string(static_cast<int>(format.order));
}

// A cache filled with a pattern, and its view.
struct Cache {
  std::vector<char> k, v;
  std::vector<float> k_scale, v_scale;
  KvLayerView view;

  bool operator==(const Cache& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() &&
             (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
    };
    return k == other.k && v == other.v && same(k_scale, other.k_scale) &&
           same(v_scale, other.v_scale);
  }
};

constexpr int64_t kSlots = 30;

Cache make_cache(const Format& format) {
  Cache cache;
  KvLayerView& view = cache.view;
  view.layout = format.layout;
  view.scale = format.scale;
  view.dtype = format.dtype;
  view.page_size = format.page_size;
  view.slots = kSlots;
  // The width of a row includes a gap of one element after it.
  int64_t k_row = format.dim + 1, v_row = format.dim_v + 1;
  int32_t heads = format.kv_heads;
  if (format.layout != KvLayout::mha) {
    k_row = format.layout == KvLayout::mla ? format.dim + format.dim_v + 1 : 656;
    heads = 1;
  }
  const auto set = [&](int64_t row, int64_t& page, int64_t& token, int64_t& head) {
    page = format.page_size * heads * row;
    token = format.order == KvOrder::nhd ? heads * row : row;
    head = format.order == KvOrder::nhd ? row : format.page_size * row;
  };
  set(k_row, view.k_page_stride, view.k_token_stride, view.k_head_stride);
  const auto bytes = static_cast<int64_t>(dtype_bytes(format.dtype));
  cache.k.assign(static_cast<size_t>(kSlots * heads * k_row * bytes), 0x55);
  if (format.layout == KvLayout::mha) {
    set(v_row, view.v_page_stride, view.v_token_stride, view.v_head_stride);
    cache.v.assign(static_cast<size_t>(kSlots * heads * v_row * bytes), 0x55);
  }
  const size_t scales = format.scale == KvScale::per_tensor ? 1
                        : format.scale == KvScale::per_head ? heads
                        : format.scale == KvScale::none     ? 0
                                                            : kSlots * heads;
  for (size_t i = 0; i < scales; ++i) {
    cache.k_scale.push_back(0.03f + 0.01f * static_cast<float>(i));
    cache.v_scale.push_back(0.5f + 0.02f * static_cast<float>(i));
  }
  view.k = cache.k.data();
  view.v = format.layout == KvLayout::mha ? cache.v.data() : view.k;
  view.k_scale = cache.k_scale.data();
  view.v_scale = cache.v_scale.data();
  return cache;
}

// Returns values of every magnitude: near the limits of fp8 and f16, tiny, and not finite.
float any_value(std::mt19937& generator, bool finite) {
  std::uniform_int_distribution<int> kind(0, finite ? 13 : 15);
  std::uniform_real_distribution<float> unit(-1, 1);
  switch (kind(generator)) {
    case 0:
      return 0.0f;
    case 1:
      return std::ldexp(unit(generator), -130);
    case 2:
      return std::ldexp(unit(generator), -8);
    case 3:
      return std::ldexp(unit(generator), -15);
    case 4:
      return 460 * unit(generator);
    case 5:
      return 66000 * unit(generator);
    case 14:
      return std::numeric_limits<float>::quiet_NaN();
    case 15:
      return unit(generator) < 0 ? -INFINITY : INFINITY;
    default:
      return 4 * unit(generator);
  }
}

struct Rows {
  std::vector<char> bytes;
  HeadRows rows;
};

Rows make_rows(int32_t tokens, int32_t heads, int32_t dim, DType dtype, std::mt19937& generator) {
  Rows made;
  const int64_t head_stride = dim + 2, token_stride = heads * head_stride + 3;
  made.bytes.resize(static_cast<size_t>(tokens * token_stride) * dtype_bytes(dtype));
  for (int64_t i = 0; i < tokens * token_stride; ++i) {
    store_float(made.bytes.data(), dtype, i, any_value(generator, i / token_stride % 2 == 0));
  }
  made.rows = {made.bytes.data(), dtype, token_stride, head_stride};
  return made;
}

void expect_same_bytes(const Format& format, bool with_map) {
  constexpr int32_t kTokens = 25;
  std::mt19937 generator(7);
  const int32_t heads = format.layout == KvLayout::mha ? format.kv_heads : 1;
  Rows k = make_rows(kTokens, heads, format.dim, format.source, generator);
  Rows v = make_rows(kTokens, heads, format.dim_v, format.source, generator);
  // Distinct slots in random order, including page 0. Some tokens are skipped.
  std::vector<int64_t> slots(kSlots);
  for (int64_t i = 0; i < kSlots; ++i) slots[static_cast<size_t>(i)] = i;
  std::shuffle(slots.begin(), slots.end(), generator);
  std::vector<int64_t> map = slots;
  std::shuffle(map.begin(), map.end(), generator);
  map[3] = map[11] = -1;
  slots[4] = slots[9] = -1;

  KvWriteParams params;
  params.k = k.rows;
  params.v = v.rows;
  params.slots = slots.data();
  params.slot_map = with_map ? map.data() : nullptr;
  params.tokens = kTokens;
  params.kv_heads = heads;
  params.head_dim = format.dim;
  params.head_dim_v = format.dim_v;
  Cache expected = make_cache(format);
  params.cache = expected.view;
  reference::kv_write(params);
  for (const cpu::Isa isa : isas()) {
    for (const int team : {1, 3}) {
      ThreadPool threads(team);
      Cache actual = make_cache(format);
      params.cache = actual.view;
      cpu::kv_write(params, threads, isa);
      ASSERT_TRUE(actual == expected) << describe(format) << " on " << cpu::isa_name(isa);
    }
  }
}

constexpr DType kSources[] = {DType::f32, DType::f16, DType::bf16};
constexpr DType kStored[] = {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2};
constexpr KvScale kScales[] = {KvScale::none, KvScale::per_tensor, KvScale::per_head,
                               KvScale::per_token_head};

TEST(CpuKvWrite, HeadsMatchReferenceByteForByte) {
  for (const DType source : kSources) {
    for (const DType stored : kStored) {
      for (const KvScale scale : kScales) {
        for (const KvOrder order : {KvOrder::nhd, KvOrder::hnd}) {
          expect_same_bytes({KvLayout::mha, order, stored, scale, source}, order == KvOrder::hnd);
        }
      }
    }
  }
}

TEST(CpuKvWrite, LatentRowsMatchReferenceByteForByte) {
  for (const DType source : kSources) {
    for (const DType stored : kStored) {
      for (const KvScale scale : kScales) {
        expect_same_bytes({KvLayout::mla, KvOrder::nhd, stored, scale, source, 1, 70, 9}, false);
      }
    }
    const Format rows = {
        KvLayout::mla_fp8_rows, KvOrder::nhd, DType::f8e4m3, KvScale::none, source, 1, 512, 64};
    expect_same_bytes(rows, true);
  }
}

// Every f32 whose rounding could fail: all bit patterns of the upper 20 bits, and the neighbours of
// each.
TEST(CpuKvWrite, Fp8RoundsLikeTheScalarConversion) {
  constexpr int32_t kDim = 1 << 12;
  ThreadPool threads(1);
  std::vector<float> values(kDim);
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
    for (const cpu::Isa isa : isas()) {
      for (uint32_t high = 0; high < 1u << 20; high += kDim / 3) {
        for (uint32_t i = 0; i < kDim; ++i) {
          values[i] = std::bit_cast<float>(((high + i / 3) << 12) + i % 3 - 1);
        }
        std::vector<uint8_t> stored(kDim * 2);
        const int64_t slot = 1;
        KvWriteParams params;
        params.cache.dtype = dtype;
        params.cache.slots = 2;
        params.cache.page_size = 1;
        params.cache.k = params.cache.v = reinterpret_cast<char*>(stored.data());
        params.cache.k_page_stride = params.cache.v_page_stride = kDim;
        params.k = params.v = dense_rows(values.data(), DType::f32, 1, kDim);
        params.slots = &slot;
        params.tokens = params.kv_heads = 1;
        params.head_dim = params.head_dim_v = kDim;
        cpu::kv_write(params, threads, isa);
        for (size_t i = 0; i < kDim; ++i) {
          const uint8_t expected =
              dtype == DType::f8e4m3 ? float_to_f8e4m3(values[i]) : float_to_f8e5m2(values[i]);
          ASSERT_EQ(stored[kDim + i], expected) << values[i] << " on " << cpu::isa_name(isa);
        }
      }
    }
  }
}

// NaN of any bits, from and to every dtype, in whole vectors and in the rest.
TEST(CpuKvWrite, NanStaysNan) {
  constexpr int32_t kDim = 37;
  ThreadPool threads(1);
  for (const DType source : {DType::f32, DType::f16, DType::bf16}) {
    for (const DType stored : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2}) {
      for (const uint32_t bits :
           {0x7fc00000u, 0xffc00000u, 0xffffffffu, 0x7f800001u, 0x7fffffffu}) {
        std::vector<char> values(kDim * sizeof(float));
        for (int32_t i = 0; i < kDim; ++i) {
          store_float(values.data(), source, i, i % 5 == 1 ? std::bit_cast<float>(bits) : 1.0f);
        }
        for (const cpu::Isa isa : isas()) {
          std::vector<char> cache(2 * kDim * sizeof(float));
          const int64_t slot = 1;
          KvWriteParams params;
          params.cache.dtype = stored;
          params.cache.slots = 2;
          params.cache.page_size = 1;
          params.cache.k = params.cache.v = cache.data();
          params.cache.k_page_stride = params.cache.v_page_stride = kDim;
          params.k = params.v = dense_rows(values.data(), source, 1, kDim);
          params.slots = &slot;
          params.tokens = params.kv_heads = 1;
          params.head_dim = params.head_dim_v = kDim;
          cpu::kv_write(params, threads, isa);
          for (int32_t i = 0; i < kDim; ++i) {
            EXPECT_EQ(std::isnan(load_float(cache.data(), stored, kDim + i)), i % 5 == 1)
                << dtype_name(source) << " to " << dtype_name(stored) << " on "
                << cpu::isa_name(isa) << ", bits " << bits << ", element " << i;
          }
        }
      }
    }
  }
}

TEST(CpuKvWrite, RefusesWhatDoesNotFit) {
  ThreadPool threads(2);
  std::vector<float> row(600);
  std::vector<char> cache(4096);
  int64_t slot = 4;
  KvWriteParams params;
  params.cache.slots = 4;
  params.cache.k = params.cache.v = cache.data();
  params.k = params.v = dense_rows(row.data(), DType::f32, 1, 8);
  params.slots = &slot;
  params.tokens = params.kv_heads = 1;
  params.head_dim = params.head_dim_v = 8;
  EXPECT_THROW(cpu::kv_write(params, threads), Error);
  params.cache.layout = KvLayout::mla_fp8_rows;
  slot = 1;
  EXPECT_THROW(cpu::kv_write(params, threads), Error);
  params.cache.layout = KvLayout::mha;
  params.k.dtype = DType::f8e4m3;
  EXPECT_THROW(cpu::kv_write(params, threads), Error);
}

}  // namespace
}  // namespace fovea::kernels
