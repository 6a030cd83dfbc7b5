// SPDX-License-Identifier: Apache-2.0
// Regions of pools: every row of a page lies in its unit, and pages that are copied by regions
// alone are those of the other pool.
#include "fovea/pool_regions.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "support/expect_error.h"

namespace fovea {
namespace {

KvCacheSpec spec_of(KvOrder order, DType dtype, KvScale scale) {
  KvCacheSpec spec;
  spec.order = order;
  spec.dtype = dtype;
  spec.scale = scale;
  spec.layers = 2;
  spec.kv_heads = 3;
  spec.head_dim = 16;
  spec.head_dim_v = 8;
  spec.page_size = 4;
  return spec;
}

// Copies page `from` of all regions to page `to`, as a transfer library would.
void move_page(const PoolDescription& source, int64_t from, const PoolDescription& target,
               int64_t to) {
  ASSERT_EQ(source.checksum, target.checksum);
  ASSERT_EQ(source.regions.size(), target.regions.size());
  for (size_t i = 0; i < source.regions.size(); ++i) {
    ASSERT_EQ(source.regions[i].unit_bytes, target.regions[i].unit_bytes);
    std::memcpy(target.regions[i].unit(to), source.regions[i].unit(from),
                source.regions[i].unit_bytes);
  }
}

// A value for each byte of a row, from where it belongs.
char value_of(int32_t layer, int64_t offset, int64_t head, size_t byte, bool is_v) {
  return static_cast<char>(1 + layer * 89 + offset * 31 + head * 17 + static_cast<int64_t>(byte) +
                           (is_v ? 7 : 0));
}

TEST(PoolRegions, PagesMoveByRegionsAlone) {
  for (const KvOrder order : {KvOrder::nhd, KvOrder::hnd}) {
    for (const auto& [dtype, scale] :
         {std::pair(DType::f32, KvScale::none), std::pair(DType::bf16, KvScale::none),
          std::pair(DType::f8e4m3, KvScale::per_token_head)}) {
      const KvCacheSpec spec = spec_of(order, dtype, scale);
      const auto source = make_kv_pool(spec, 5), target = make_kv_pool(spec, 9);
      const size_t k_bytes = 16 * dtype_bytes(dtype), v_bytes = 8 * dtype_bytes(dtype);
      const auto each = [&](const KvPool& pool, int64_t page, const auto& row, const auto& factor) {
        for (int32_t layer = 0; layer < spec.layers; ++layer) {
          const KvLayerView view = pool.layer(layer);
          for (int64_t offset = 0; offset < spec.page_size; ++offset) {
            for (int64_t head = 0; head < spec.kv_heads; ++head) {
              const int64_t slot = page * spec.page_size + offset;
              for (size_t i = 0; i < k_bytes; ++i) {
                row(k_address(view, slot, head)[i], value_of(layer, offset, head, i, false));
              }
              for (size_t i = 0; i < v_bytes; ++i) {
                row(v_address(view, slot, head)[i], value_of(layer, offset, head, i, true));
              }
              if (view.k_scale == nullptr) continue;
              factor(view.k_scale[slot * spec.kv_heads + head], static_cast<float>(offset + head));
              factor(view.v_scale[slot * spec.kv_heads + head], static_cast<float>(offset - head));
            }
          }
        }
      };
      each(
          *source, 2, [](char& to, char value) { to = value; },
          [](float& to, float value) { to = value; });
      move_page(describe_pool(*source), 2, describe_pool(*target), 7);
      each(
          *target, 7, [](char got, char value) { ASSERT_EQ(got, value); },
          [](float got, float value) { ASSERT_EQ(got, value); });
    }
  }
}

TEST(PoolRegions, LatentsHaveOneArray) {
  KvCacheSpec spec;
  spec.layout = KvLayout::mla_fp8_rows;
  spec.dtype = DType::f8e4m3;
  spec.layers = 3;
  spec.kv_heads = 1;
  spec.head_dim = 576;
  spec.head_dim_v = 512;
  spec.page_size = 64;
  const auto pool = make_kv_pool(spec, 4);
  const PoolDescription description = describe_pool(*pool);
  ASSERT_EQ(description.regions.size(), 3u);
  EXPECT_EQ(description.regions[2].name, "layer 2 k");
  EXPECT_EQ(description.regions[0].unit_bytes, 64u * 656u);
  EXPECT_EQ(description.regions[0].units, 4);
  EXPECT_EQ(description.regions[1].address, pool->layer(1).k);
}

TEST(PoolRegions, StatesMoveByRegionsAlone) {
  StateCacheSpec spec{
      .layers = 2, .conv_dim = 6, .conv_width = 4, .heads = 2, .rows = 3, .columns = 5};
  const auto source = make_state_pool(spec, 4), target = make_state_pool(spec, 4);
  const PoolDescription from = describe_pool(*source), to = describe_pool(*target);
  EXPECT_EQ(from.regions.size(), 4u);
  const StateLayerView view = source->layer(1);
  view.state_as<float>()[2 * view.state_slot_stride + 29] = 3;
  view.conv[2 * view.conv_slot_stride + 17] = 4;
  move_page(from, 2, to, 1);
  const StateLayerView moved = target->layer(1);
  EXPECT_EQ(moved.state_as<float>()[moved.state_slot_stride + 29], 3);
  EXPECT_EQ(moved.conv[moved.conv_slot_stride + 17], 4);
}

TEST(PoolRegions, KeptDraftsMoveWithTheirStates) {
  const StateCacheSpec spec{.layers = 2,
                            .conv_width = 1,
                            .heads = 2,
                            .rows = 3,
                            .columns = 5,
                            .max_drafts = 3,
                            .draft_inputs = 7};
  const auto source = make_state_pool(spec, 4), target = make_state_pool(spec, 4);
  const PoolDescription from = describe_pool(*source), to = describe_pool(*target);
  EXPECT_EQ(from.regions.size(), 5u);
  constexpr int64_t kValues = 2 * 3 * 7;
  source->layer(1).drafts[2 * kValues + 41] = 6;
  source->marks()[2] = {.tokens = 9, .drafts = 1, .row = 5};
  move_page(from, 2, to, 1);
  EXPECT_EQ(target->layer(1).drafts[kValues + 41], 6);
  EXPECT_EQ(target->marks()[1].tokens, 9);
  EXPECT_EQ(target->marks()[1].row, 5);
}

TEST(PoolRegions, ChecksumsTellSpecsApart) {
  std::set<uint64_t> checksums;
  KvCacheSpec spec = spec_of(KvOrder::nhd, DType::bf16, KvScale::none);
  const auto add = [&] { checksums.insert(describe_pool(*make_kv_pool(spec, 3)).checksum); };
  add();
  spec.page_size = 8;
  add();
  spec.order = KvOrder::hnd;
  add();
  spec.layers = 3;
  add();
  spec.dtype = DType::f16;
  add();
  EXPECT_EQ(checksums.size(), 5u);
  EXPECT_EQ(describe_pool(*make_kv_pool(spec, 3)).checksum,
            describe_pool(*make_kv_pool(spec, 30)).checksum);
}

TEST(PoolRegions, ScalesOfAllPagesAreRefused) {
  const auto pool = make_kv_pool(spec_of(KvOrder::nhd, DType::f8e4m3, KvScale::per_head), 3);
  test::expect_error(ErrorCode::unsupported, "scale is per_head", [&] { describe_pool(*pool); });
}

}  // namespace
}  // namespace fovea
