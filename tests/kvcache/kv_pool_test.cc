// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "fovea/kv_cache.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_error;
using test::expect_invalid;

KvCacheSpec mha_spec() {
  KvCacheSpec spec;
  spec.layers = 3;
  spec.kv_heads = 2;
  spec.head_dim = 24;
  spec.head_dim_v = 16;
  spec.page_size = 4;
  return spec;
}

// Writes a different byte pattern into every (layer, slot, head) row and reads all of them back,
// which finds any two rows that share a byte.
void expect_rows_are_disjoint(const KvPool& pool) {
  const KvCacheSpec& spec = pool.spec();
  const bool rows = spec.layout == KvLayout::mla_fp8_rows;
  const bool has_v = spec.layout == KvLayout::mha;
  const size_t k_bytes = rows ? 656 : spec.head_dim * dtype_bytes(spec.dtype);
  const size_t v_bytes = spec.head_dim_v * dtype_bytes(spec.dtype);
  for (const bool write : {true, false}) {
    uint32_t stamp = 1;
    const auto touch = [&](void* at, size_t bytes) {
      for (size_t i = 0; i + 2 <= bytes; i += 2) {
        const auto value = static_cast<uint16_t>(stamp * 2654435761u >> 8);
        if (write) {
          std::memcpy(static_cast<char*>(at) + i, &value, 2);
        } else {
          ASSERT_EQ(std::memcmp(static_cast<char*>(at) + i, &value, 2), 0) << stamp;
        }
        ++stamp;
      }
    };
    for (int32_t layer = 0; layer < spec.layers; ++layer) {
      const KvLayerView view = pool.layer(layer);
      for (int64_t slot = 0; slot < view.slots; ++slot) {
        for (int64_t head = 0; head < spec.kv_heads; ++head) {
          touch(k_address(view, slot, head), k_bytes);
          if (has_v) touch(v_address(view, slot, head), v_bytes);
          if (spec.scale == KvScale::per_token_head) {
            touch(view.k_scale + slot * spec.kv_heads + head, sizeof(float));
            if (has_v) touch(view.v_scale + slot * spec.kv_heads + head, sizeof(float));
          }
        }
      }
    }
  }
}

TEST(KvPool, RowsOfEveryLayoutAreDisjointAndZero) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2}) {
    for (const KvOrder order : {KvOrder::nhd, KvOrder::hnd}) {
      for (const KvScale scale :
           {KvScale::none, KvScale::per_tensor, KvScale::per_head, KvScale::per_token_head}) {
        if (scale != KvScale::none && !is_fp8(dtype)) continue;
        for (const KvLayout layout : {KvLayout::mha, KvLayout::mla}) {
          KvCacheSpec spec = mha_spec();
          spec.dtype = dtype;
          spec.order = order;
          spec.scale = scale;
          spec.layout = layout;
          if (layout == KvLayout::mla) spec.kv_heads = 1;
          const auto pool = make_kv_pool(spec, 5);
          EXPECT_EQ(pool->pages(), 5);
          EXPECT_TRUE(pool->slot_map().empty());
          EXPECT_EQ(pool->layer(0).slots, 20);
          EXPECT_EQ(*k_address(pool->layer(2), 19, spec.kv_heads - 1), 0);
          expect_rows_are_disjoint(*pool);
        }
      }
    }
  }
}

TEST(KvPool, PageStrideFollowsTheOrder) {
  KvCacheSpec spec = mha_spec();
  KvLayerView view = make_kv_pool(spec, 2)->layer(0);
  EXPECT_EQ(view.k_page_stride, 4 * 2 * 24);
  EXPECT_EQ(view.k_token_stride, 2 * 24);
  EXPECT_EQ(view.k_head_stride, 24);
  EXPECT_EQ(view.v_token_stride, 2 * 16);
  spec.order = KvOrder::hnd;
  view = make_kv_pool(spec, 2)->layer(0);
  EXPECT_EQ(view.k_token_stride, 24);
  EXPECT_EQ(view.k_head_stride, 4 * 24);
  EXPECT_EQ(view.v_head_stride, 4 * 16);
}

TEST(KvPool, MlaValueIsTheFrontOfTheRow) {
  KvCacheSpec spec = mha_spec();
  spec.layout = KvLayout::mla;
  spec.kv_heads = 1;
  spec.head_dim = 320;
  spec.head_dim_v = 256;
  spec.dtype = DType::f8e4m3;
  spec.scale = KvScale::per_token_head;
  const auto pool = make_kv_pool(spec, 3);
  const KvLayerView view = pool->layer(1);
  EXPECT_EQ(v_address(view, 7, 0), k_address(view, 7, 0));
  EXPECT_EQ(k_address(view, 8, 0) - k_address(view, 7, 0), 320);
  EXPECT_EQ(view.v_scale, view.k_scale);
  EXPECT_EQ(spec.bytes_per_page(), 3u * 4 * (320 + 4));
}

TEST(KvPool, Fp8RowsHave656Bytes) {
  KvCacheSpec spec = mha_spec();
  spec.layout = KvLayout::mla_fp8_rows;
  spec.dtype = DType::f8e4m3;
  spec.kv_heads = 1;
  spec.head_dim = 576;
  spec.head_dim_v = 512;
  const auto pool = make_kv_pool(spec, 3);
  EXPECT_EQ(k_address(pool->layer(0), 9, 0) - k_address(pool->layer(0), 0, 0), 9 * 656);
  EXPECT_EQ(spec.bytes_per_page(), 3u * 4 * 656);
  expect_rows_are_disjoint(*pool);
}

TEST(KvPool, BytesPerPageCountsScales) {
  KvCacheSpec spec = mha_spec();
  EXPECT_EQ(spec.bytes_per_page(), 3u * 4 * 2 * (24 + 16) * 4);
  spec.dtype = DType::f8e5m2;
  spec.scale = KvScale::per_token_head;
  EXPECT_EQ(spec.bytes_per_page(), 3u * 4 * 2 * (24 + 16 + 2 * 4));
  // Alignment adds less than four cache lines per layer.
  const size_t plain = 10 * spec.bytes_per_page();
  EXPECT_GE(kv_pool_bytes(spec, 10), plain);
  EXPECT_LT(kv_pool_bytes(spec, 10), plain + 3 * 4 * 64);
}

TEST(KvPool, CallerScalesStartAtOneAndBelongToTheLayer) {
  KvCacheSpec spec = mha_spec();
  spec.dtype = DType::f8e4m3;
  spec.scale = KvScale::per_head;
  const auto pool = make_kv_pool(spec, 2);
  EXPECT_EQ(pool->layer(2).k_scale[1], 1.0f);
  EXPECT_EQ(pool->layer(2).v_scale[1], 1.0f);
  pool->layer(1).k_scale[1] = 0.25f;
  EXPECT_EQ(pool->layer(1).k_scale[1], 0.25f);
  EXPECT_EQ(pool->layer(1).v_scale[1], 1.0f);
  EXPECT_EQ(pool->layer(0).k_scale[1], 1.0f);
  spec.scale = KvScale::per_tensor;
  EXPECT_EQ(make_kv_pool(spec, 2)->layer(0).v_scale[0], 1.0f);
  spec.scale = KvScale::none;
  EXPECT_EQ(make_kv_pool(spec, 2)->layer(0).k_scale, nullptr);
}

TEST(KvPool, ArraysStartOnCacheLines) {
  KvCacheSpec spec = mha_spec();
  spec.head_dim = 3;
  spec.head_dim_v = 5;
  spec.dtype = DType::f8e4m3;
  spec.scale = KvScale::per_token_head;
  const auto pool = make_kv_pool(spec, 3);
  for (int32_t layer = 0; layer < spec.layers; ++layer) {
    const KvLayerView view = pool->layer(layer);
    for (const void* array : {static_cast<void*>(view.k), static_cast<void*>(view.v),
                              static_cast<void*>(view.k_scale), static_cast<void*>(view.v_scale)}) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(array) % 64, 0u);
    }
  }
}

TEST(KvPool, ErrorsNameTheFieldItsValueAndTheLimit) {
  const auto refuse = [](const std::string& part, auto change, int64_t pages = 4) {
    KvCacheSpec spec = mha_spec();
    change(spec);
    expect_invalid(part, [&] { make_kv_pool(spec, pages); });
  };
  refuse("layout is KvLayout(9)", [](auto& s) { s.layout = static_cast<KvLayout>(9); });
  refuse("order is KvOrder(9)", [](auto& s) { s.order = static_cast<KvOrder>(9); });
  refuse("scale is KvScale(9)", [](auto& s) { s.scale = static_cast<KvScale>(9); });
  refuse("dtype is DType(99)", [](auto& s) { s.dtype = static_cast<DType>(99); });
  refuse("layers is 0", [](KvCacheSpec& spec) { spec.layers = 0; });
  refuse("kv_heads is -1", [](KvCacheSpec& spec) { spec.kv_heads = -1; });
  refuse("head_dim is 0", [](KvCacheSpec& spec) { spec.head_dim = 0; });
  refuse("head_dim_v is 0", [](KvCacheSpec& spec) { spec.head_dim_v = 0; });
  refuse("page_size is 0", [](KvCacheSpec& spec) { spec.page_size = 0; });
  refuse("dtype", [](KvCacheSpec& spec) { spec.dtype = DType::i32; });
  refuse("takes no scales", [](KvCacheSpec& spec) { spec.scale = KvScale::per_head; });
  refuse("window is 8", [](KvCacheSpec& spec) { spec.window = 8; });
  refuse(
      "pages is 1", [](KvCacheSpec&) {}, 1);
  refuse(
      "pages is 4294967296", [](KvCacheSpec&) {}, int64_t{1} << 32);
  refuse("kv_heads is 2", [](KvCacheSpec& spec) { spec.layout = KvLayout::mla; });
  refuse("head_dim_v is 25", [](KvCacheSpec& spec) {
    spec.layout = KvLayout::mla;
    spec.kv_heads = 1;
    spec.head_dim_v = 25;
  });
  refuse("mla_fp8_rows hold 576, 512 of fp8_e4m3", [](KvCacheSpec& spec) {
    spec.layout = KvLayout::mla_fp8_rows;
    spec.kv_heads = 1;
  });
  refuse("scales inside the rows", [](KvCacheSpec& spec) {
    spec.layout = KvLayout::mla_fp8_rows;
    spec.kv_heads = 1;
    spec.scale = KvScale::per_tensor;
  });
  refuse("overflows 64 bits", [](KvCacheSpec& spec) {
    spec.head_dim = std::numeric_limits<int32_t>::max();
    spec.kv_heads = std::numeric_limits<int32_t>::max();
    spec.page_size = 1000;
  });
  expect_invalid("layer is 3", [] { make_kv_pool(mha_spec(), 2)->layer(3); });
}

TEST(KvPool, RefusedMemoryIsAnErrorThatNamesTheBytes) {
  KvCacheSpec spec = mha_spec();
  spec.head_dim = 1 << 20;
  spec.head_dim_v = 1 << 20;
  // 2^47 elements per layer: more than the address space holds.
  const int64_t pages = int64_t{1} << 24;
  expect_error(ErrorCode::out_of_memory, std::to_string(kv_pool_bytes(spec, pages)),
               [&] { make_kv_pool(spec, pages); });
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Rows of 576 at 4 M slots lie beyond 2^31 elements and 4 GiB.
TEST(KvPool, AddressesPast32BitsAndUntouchedPagesCostNothing) {
  KvCacheSpec spec;
  spec.layout = KvLayout::mla;
  spec.dtype = DType::bf16;
  spec.layers = 1;
  spec.kv_heads = 1;
  spec.head_dim = 576;
  spec.head_dim_v = 512;
  spec.page_size = 64;
  constexpr int64_t kSlots = int64_t{4} << 20;
  const int64_t before = resident_bytes();
  const auto pool = make_kv_pool(spec, kSlots / 64);
  const KvLayerView view = pool->layer(0);
  ASSERT_EQ(view.slots, kSlots);
  char* last = k_address(view, kSlots - 1, 0);
  EXPECT_EQ(last - view.k, (kSlots - 1) * 1152);
  EXPECT_GT(last - view.k, int64_t{1} << 32);
  EXPECT_GT((last - view.k) / 2, int64_t{1} << 31);
  std::memset(last, 0x5a, 1152);
  // The bytes that a 32-bit offset would have changed instead.
  for (const int64_t bits : {31, 32}) {
    EXPECT_EQ(view.k[(last - view.k) & ((int64_t{1} << bits) - 1)], 0);
  }
  EXPECT_EQ(k_address(view, kSlots - 1, 0)[1151], 0x5a);
  EXPECT_EQ(k_address(view, kSlots - 2, 0)[1151], 0);
  EXPECT_LT(resident_bytes() - before, 64 << 20);
}

TEST(SplitPages, KeepsEveryAddress) {
  const auto pool = make_kv_pool(mha_spec(), 5);
  const KvLayerView view = pool->layer(1);
  for (const int32_t page_size : {1, 2, 4}) {
    const auto split = split_pages(view, page_size);
    ASSERT_TRUE(split);
    EXPECT_EQ(split->page_size, page_size);
    for (int64_t slot = 0; slot < view.slots; ++slot) {
      EXPECT_EQ(k_address(*split, slot, 1), k_address(view, slot, 1));
      EXPECT_EQ(v_address(*split, slot, 1), v_address(view, slot, 1));
    }
  }
  EXPECT_FALSE(split_pages(view, 3));
  EXPECT_FALSE(split_pages(view, 8));
  EXPECT_FALSE(split_pages(view, 0));
}

TEST(SplitPages, HeadsBetweenTokensCannotBeSplit) {
  KvCacheSpec spec = mha_spec();
  spec.order = KvOrder::hnd;
  EXPECT_FALSE(split_pages(make_kv_pool(spec, 2)->layer(0), 2));
  EXPECT_TRUE(split_pages(make_kv_pool(spec, 2)->layer(0), 4));
  spec.kv_heads = 1;
  EXPECT_TRUE(split_pages(make_kv_pool(spec, 2)->layer(0), 2));
}

}  // namespace
}  // namespace fovea
