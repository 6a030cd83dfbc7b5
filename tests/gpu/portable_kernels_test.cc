// SPDX-License-Identifier: Apache-2.0
// The portable kernels on a GPU: cache write, page table, plan, attention, merge, against fp64
// loops. Skipped where there is no GPU; tests/emulation runs the small cases on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "core/float_types.h"
#include "gpu/gpu.h"
#include "gpu/portable_kernel_cases.h"
#include "kernels/cuda/common/plan_launch.h"
#include "support/device_array.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::to_device;
using test::to_host;

// A case, and whether its rows go to the tiles of decode.
using PortableKernels =
    test::GpuKernelTest<::testing::TestWithParam<std::tuple<PortableCase, bool>>>;

TEST_P(PortableKernels, MatchFp64) {
  const auto& [c, decode] = GetParam();
  const HostBatch run(c);
  const bool fp8 = c.cache != "bf16";
  const size_t element = fp8 ? 1 : 2;
  const int32_t slots = run.pages * c.page_size;
  const gpu::DeviceBuffer k_cache(static_cast<size_t>(slots) * c.kv_heads * c.head_dim * element);
  const gpu::DeviceBuffer v_cache(static_cast<size_t>(slots) * c.kv_heads * c.head_dim_v * element);
  // Every byte nobody writes is NaN.
  gpu::fill_bytes(k_cache.data(), 0xff, k_cache.bytes(), nullptr);
  gpu::fill_bytes(v_cache.data(), 0xff, v_cache.bytes(), nullptr);
  const gpu::DeviceBuffer k_scale(static_cast<size_t>(slots) * c.kv_heads * 4);
  const gpu::DeviceBuffer v_scale(static_cast<size_t>(slots) * c.kv_heads * 4);
  const auto k = to_device(run.k), v = to_device(run.v), q = to_device(run.q);
  const auto q_codes = to_device(run.q_codes), q_scale = to_device(run.q_scale);
  const auto all_slots = to_device(run.all_slots);
  const auto kv_begin = to_device(run.kv_begin), kv_lens = to_device(run.kv_lens);
  const auto q_indptr = to_device(run.q_indptr), rows = to_device(run.rows);
  const auto slots_table = to_device(run.slots_table), tree = to_device(run.tree);
  const auto sinks = to_device(run.sinks), slopes = to_device(run.slopes);
  const auto requests = static_cast<int32_t>(c.requests.size());

  KvWriteParams write{};
  write.k = k.data();
  write.v = v.data();
  write.k_token_stride = int64_t{c.kv_heads} * c.head_dim;
  write.k_head_stride = c.head_dim;
  write.v_token_stride = int64_t{c.kv_heads} * c.head_dim_v;
  write.v_head_stride = c.head_dim_v;
  write.slots = all_slots.data<int64_t>();
  write.slot_count = slots;
  write.q_indptr = kv_begin.data<int32_t>();
  write.requests = requests;
  write.k_cache = k_cache.data();
  write.v_cache = v_cache.data();
  write.k_page_stride = c.page_size * write.k_token_stride;
  write.v_page_stride = c.page_size * write.v_token_stride;
  write.k_place_stride = write.k_token_stride;
  write.v_place_stride = write.v_token_stride;
  write.k_cache_head_stride = c.head_dim;
  write.v_cache_head_stride = c.head_dim_v;
  write.k_scale = k_scale.data<float>();
  write.v_scale = v_scale.data<float>();
  write.scale_kind = fp8 ? kScalePerTokenHead : kScaleNone;
  write.page_size = c.page_size;
  write.kv_heads = c.kv_heads;
  write.head_dim = c.head_dim;
  write.head_dim_v = c.head_dim_v;
  load("portable/kv_write", {"bf16", c.cache})
      .launch({static_cast<uint32_t>((run.all_keys * c.kv_heads + 7) / 8)}, write, nullptr);

  const gpu::DeviceBuffer page_table(static_cast<size_t>(requests) * run.max_pages * 4);
  TableWriteParams table{};
  table.given = slots_table.data<int32_t>();
  table.given_stride = int64_t{run.max_pages} * c.page_size;
  table.given_end = slots;
  table.request_rows = rows.data<int32_t>();
  table.kv_lens = kv_lens.data<int32_t>();
  table.page_table = page_table.data<int32_t>();
  table.page_table_stride = run.max_pages;
  table.requests = requests;
  table.page_size = c.page_size;

  Kernel attention = load("portable/attention", {std::to_string(c.head_dim),
                                                 std::to_string(c.head_dim_v), c.query, c.cache,
                                                 decode                ? "16"
                                                 : c.head_dim_v <= 128 ? "128"
                                                                       : "64"});
  const int32_t ctas = context->info().cores * 2;
  const int32_t tile = attention.row_tile();
  int64_t tiles = requests;
  for (const auto& [q_len, kv_len] : c.requests) tiles += q_len * (c.q_heads / c.kv_heads) / tile;
  const gpu::DeviceBuffer items(static_cast<size_t>(tiles * c.kv_heads + ctas) * sizeof(WorkItem));
  const gpu::DeviceBuffer cta_begin(ctas * 4), cta_end(ctas * 4), merges(ctas * sizeof(MergeItem));
  const gpu::DeviceBuffer tile_indptr(static_cast<size_t>(requests + 1) * 4);
  const gpu::DeviceBuffer partial_out(static_cast<size_t>(2 * ctas) * tile * c.head_dim_v * 4);
  const gpu::DeviceBuffer partial_lse(static_cast<size_t>(2 * ctas) * tile * 4);
  gpu::fill_bytes(partial_out.data(), 0xff, partial_out.bytes(), nullptr);

  AttentionParams params{};
  params.batch.q_indptr = q_indptr.data<int32_t>();
  params.batch.kv_lens = kv_lens.data<int32_t>();
  params.batch.requests = requests;
  params.batch.q_heads = c.q_heads;
  params.batch.kv_heads = c.kv_heads;
  params.batch.mask = {.causal = 1, .window = c.window, .chunk = c.chunk};
  if (c.tree) params.batch.mask.tree = tree.data<uint64_t>();
  params.keys.k = k_cache.data();
  params.keys.v = v_cache.data();
  params.keys.k_page_stride = write.k_page_stride;
  params.keys.k_token_stride = write.k_place_stride;
  params.keys.k_head_stride = write.k_cache_head_stride;
  params.keys.v_page_stride = write.v_page_stride;
  params.keys.v_token_stride = write.v_place_stride;
  params.keys.v_head_stride = write.v_cache_head_stride;
  params.keys.page_table = page_table.data<int32_t>();
  params.keys.page_table_stride = run.max_pages;
  params.keys.page_size = c.page_size;
  if (fp8) {
    params.keys.k_scale = k_scale.data<float>();
    params.keys.v_scale = v_scale.data<float>();
    params.keys.scale_slot_stride = c.kv_heads;
    params.keys.scale_head_stride = 1;
  }
  params.q = run.q_codes.empty() ? q.data() : q_codes.data();
  if (!run.q_scale.empty()) params.q_scale = q_scale.data<float>();
  params.q_scale_token_stride = c.q_heads;
  params.q_scale_head_stride = 1;
  params.q_token_stride = int64_t{c.q_heads} * c.head_dim;
  params.q_head_stride = c.head_dim;
  const size_t out_count = static_cast<size_t>(run.tokens) * c.q_heads * c.head_dim_v;
  const gpu::DeviceBuffer out(std::max<size_t>(out_count, 1) * 2);
  const gpu::DeviceBuffer lse(std::max<size_t>(static_cast<size_t>(run.tokens) * c.q_heads, 1) * 4);
  gpu::fill_bytes(out.data(), 0xff, out.bytes(), nullptr);
  gpu::fill_bytes(lse.data(), 0xff, lse.bytes(), nullptr);
  params.out = out.data();
  params.out_token_stride = int64_t{c.q_heads} * c.head_dim_v;
  params.out_head_stride = c.head_dim_v;
  params.lse = lse.data<float>();
  params.head_dim = c.head_dim;
  params.head_dim_v = c.head_dim_v;
  params.scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
  params.logit_cap = c.logit_cap;
  if (c.sinks) params.sinks = sinks.data<float>();
  if (c.alibi) params.alibi_slopes = slopes.data<float>();
  params.work = {.items = items.data<WorkItem>(),
                 .cta_begin = cta_begin.data<int32_t>(),
                 .cta_end = cta_end.data<int32_t>(),
                 .merges = merges.data<MergeItem>(),
                 .tile_indptr = tile_indptr.data<int32_t>(),
                 .partial_out = partial_out.data<float>(),
                 .partial_lse = partial_lse.data<float>(),
                 .ctas = ctas};
  const PlanLaunch<PlanParams> plan{{params.batch, params.work, 0}, {table}, 3};
  const MergeParams merge{
      params.batch,           params.work, params.out,   params.out_token_stride,
      params.out_head_stride, params.lse,  params.sinks, c.head_dim_v};
  load("portable/plan", {std::to_string(tile)}).launch({4}, plan, nullptr);
  attention.launch({static_cast<uint32_t>(ctas)}, params, nullptr);
  load("portable/merge", {std::to_string(tile), "bf16"})
      .launch({static_cast<uint32_t>(ctas), static_cast<uint32_t>(tile / 16)}, merge, nullptr);
  gpu::synchronize(nullptr);

  const auto got = to_host<uint16_t>(out, out_count);
  const auto got_lse = to_host<float>(lse, static_cast<size_t>(run.tokens) * c.q_heads);
  double error = 0, norm = 0;
  for (int32_t r = 0; r < requests; ++r) {
    const int32_t q_len = c.requests[r].first;
    for (int32_t t = 0; t < q_len; t += std::max(1, q_len / 37)) {
      for (int32_t h = 0; h < c.q_heads; ++h) {
        double lse_expected = 0;
        const auto expected = run.expected(r, t, h, lse_expected);
        const size_t row = static_cast<size_t>(run.q_indptr[r] + t) * c.q_heads + h;
        if (std::isinf(lse_expected)) {
          EXPECT_EQ(got_lse[row], -std::numeric_limits<float>::infinity())
              << "request " << r << " token " << t;
        } else {
          ASSERT_NEAR(got_lse[row], lse_expected, 2e-3)
              << "request " << r << " token " << t << " head " << h;
        }
        for (int32_t d = 0; d < c.head_dim_v; ++d) {
          const double difference = bf16_to_float(got[row * c.head_dim_v + d]) - expected[d];
          error += difference * difference;
          norm += expected[d] * expected[d];
        }
      }
    }
  }
  EXPECT_LE(std::sqrt(error), 5e-3 * std::sqrt(norm) + 1e-12);
}

INSTANTIATE_TEST_SUITE_P(All, PortableKernels,
                         ::testing::Combine(::testing::ValuesIn(portable_cases()),
                                            ::testing::Bool()),
                         [](const auto& test) {
                           return std::get<0>(test.param).name +
                                  (std::get<1>(test.param) ? "_decode_rows" : "");
                         });

}  // namespace
}  // namespace fovea::kernels::cuda
