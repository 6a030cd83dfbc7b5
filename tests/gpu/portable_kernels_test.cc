// SPDX-License-Identifier: Apache-2.0
// The portable kernels on a GPU: cache write, page table, plan, attention, merge, against fp64
// loops. Skipped without a GPU; tests/emulation runs the small cases on the CPU.
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
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/common/head_write_params.h"
#include "kernels/cuda/common/plan_kernel_params.h"
#include "kernels/cuda/portable/merge/launch.h"
#include "support/device_array.h"
#include "support/expect_close.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {
namespace {

using test::to_device;
using test::to_host;

// A case, and whether its rows use the tiles of decode.
using PortableKernels =
    test::GpuKernelTest<::testing::TestWithParam<std::tuple<PortableCase, bool>>>;

// A case on the device, and the kernels' parameters for it. Bytes of caches and results that no
// kernel writes are NaN.
class DeviceBatch {
 public:
  DeviceBatch(const HostBatch& batch, int32_t ctas, int32_t row_tile)
      : batch_(batch), ctas_(ctas), row_tile_(row_tile) {
    for (const gpu::DeviceBuffer* buffer : {&k_cache_, &v_cache_, &partial_out_, &out_, &lse_}) {
      gpu::fill_bytes(buffer->data(), 0xff, buffer->bytes(), nullptr);
    }
  }

  KvWriteParams write() const {
    KvWriteParams write{};
    write.k = k_.data();
    write.v = v_.data();
    write.k_token_stride = int64_t{c_.kv_heads} * c_.head_dim;
    write.k_head_stride = c_.head_dim;
    write.v_token_stride = int64_t{c_.kv_heads} * c_.head_dim_v;
    write.v_head_stride = c_.head_dim_v;
    write.slots = all_slots_.data<int64_t>();
    write.slot_count = slots_;
    write.q_indptr = kv_begin_.data<int32_t>();
    write.requests = requests_;
    write.k_cache = k_cache_.data();
    write.v_cache = v_cache_.data();
    write.k_page_stride = c_.page_size * write.k_token_stride;
    write.v_page_stride = c_.page_size * write.v_token_stride;
    write.k_place_stride = write.k_token_stride;
    write.v_place_stride = c_.v_by_heads ? c_.head_dim_v : write.v_token_stride;
    write.k_cache_head_stride = c_.head_dim;
    write.v_cache_head_stride = int64_t{c_.v_by_heads ? c_.page_size : 1} * c_.head_dim_v;
    write.k_scale = k_scale_.data<float>();
    write.v_scale = v_scale_.data<float>();
    write.scale_kind = fp8_ ? kScalePerTokenHead : kScaleNone;
    write.page_size = c_.page_size;
    write.kv_heads = c_.kv_heads;
    write.head_dim = c_.head_dim;
    write.head_dim_v = c_.head_dim_v;
    return write;
  }

  TableWriteParams table() const {
    TableWriteParams table{};
    table.given = slots_table_.data<int32_t>();
    table.given_stride = int64_t{batch_.max_pages} * c_.page_size;
    table.given_end = slots_;
    table.request_rows = rows_.data<int32_t>();
    table.kv_lens = kv_lens_.data<int32_t>();
    table.page_table = page_table_.data<int32_t>();
    table.page_table_stride = batch_.max_pages;
    table.requests = requests_;
    table.page_size = c_.page_size;
    return table;
  }

  AttentionParams attention() const {
    AttentionParams params{};
    params.batch.q_indptr = q_indptr_.data<int32_t>();
    params.batch.kv_lens = kv_lens_.data<int32_t>();
    params.batch.requests = requests_;
    params.batch.q_heads = c_.q_heads;
    params.batch.kv_heads = c_.kv_heads;
    params.batch.mask = {.causal = 1, .window = c_.window, .chunk = c_.chunk};
    if (c_.tree) params.batch.mask.tree = tree_.data<uint64_t>();
    params.keys = keys();
    params.q = batch_.q_codes.empty() ? q_.data() : q_codes_.data();
    if (!batch_.q_scale.empty()) params.q_scale = q_scale_.data<float>();
    params.q_scale_token_stride = c_.q_heads;
    params.q_scale_head_stride = 1;
    params.q_token_stride = int64_t{c_.q_heads} * c_.head_dim;
    params.q_head_stride = c_.head_dim;
    params.out = out_.data();
    params.out_token_stride = int64_t{c_.q_heads} * c_.head_dim_v;
    params.out_head_stride = c_.head_dim_v;
    params.lse = lse_.data<float>();
    params.lse_token_stride = c_.q_heads;
    params.head_dim = c_.head_dim;
    params.head_dim_v = c_.head_dim_v;
    params.scale = 1 / std::sqrt(static_cast<float>(c_.head_dim));
    params.logit_cap = c_.logit_cap;
    if (c_.sinks) params.sinks = sinks_.data<float>();
    if (c_.alibi) params.alibi_slopes = slopes_.data<float>();
    params.work = {.items = items_.data<WorkItem>(),
                   .cta_begin = cta_begin_.data<int32_t>(),
                   .cta_end = cta_end_.data<int32_t>(),
                   .merges = merges_.data<MergeItem>(),
                   .tile_indptr = tile_indptr_.data<int32_t>(),
                   .partial_out = partial_out_.data<float>(),
                   .partial_lse = partial_lse_.data<float>(),
                   .ctas = ctas_};
    return params;
  }

  std::vector<uint16_t> out() const { return to_host<uint16_t>(out_, rows() * c_.head_dim_v); }
  std::vector<float> lse() const { return to_host<float>(lse_, rows()); }

 private:
  KeyParams keys() const {
    const KvWriteParams written = write();
    KeyParams keys{};
    keys.k = k_cache_.data();
    keys.v = v_cache_.data();
    keys.k_page_stride = written.k_page_stride;
    keys.k_token_stride = written.k_place_stride;
    keys.k_head_stride = written.k_cache_head_stride;
    keys.v_page_stride = written.v_page_stride;
    keys.v_token_stride = written.v_place_stride;
    keys.v_head_stride = written.v_cache_head_stride;
    keys.page_table = page_table_.data<int32_t>();
    keys.page_table_stride = batch_.max_pages;
    keys.page_size = c_.page_size;
    if (fp8_) {
      keys.k_scale = k_scale_.data<float>();
      keys.v_scale = v_scale_.data<float>();
      keys.scale_slot_stride = c_.kv_heads;
      keys.scale_head_stride = 1;
    }
    return keys;
  }
  size_t rows() const { return static_cast<size_t>(batch_.tokens) * c_.q_heads; }
  // Returns the bytes of [slots, kv_heads, dim].
  size_t cache_bytes(int32_t dim) const {
    return static_cast<size_t>(slots_) * c_.kv_heads * dim * (fp8_ ? 1 : 2);
  }
  size_t items() const {
    int64_t tiles = requests_;
    for (const auto& [q_len, kv_len] : c_.requests) {
      tiles += q_len * (c_.q_heads / c_.kv_heads) / row_tile_;
    }
    return static_cast<size_t>(tiles * c_.kv_heads + ctas_);
  }
  // Returns at least 1, so that there is memory even without results.
  size_t some(size_t count) const { return std::max<size_t>(count, 1); }

  const HostBatch& batch_;
  const int32_t ctas_, row_tile_;
  const PortableCase& c_ = batch_.test;
  const bool fp8_ = c_.cache != "bf16";
  const int32_t requests_ = static_cast<int32_t>(c_.requests.size());
  const int32_t slots_ = batch_.pages * c_.page_size;
  const gpu::DeviceBuffer k_ = to_device(batch_.k), v_ = to_device(batch_.v),
                          q_ = to_device(batch_.q), q_codes_ = to_device(batch_.q_codes),
                          q_scale_ = to_device(batch_.q_scale),
                          all_slots_ = to_device(batch_.all_slots),
                          kv_begin_ = to_device(batch_.kv_begin),
                          kv_lens_ = to_device(batch_.kv_lens),
                          q_indptr_ = to_device(batch_.q_indptr), rows_ = to_device(batch_.rows),
                          slots_table_ = to_device(batch_.slots_table),
                          tree_ = to_device(batch_.tree), sinks_ = to_device(batch_.sinks),
                          slopes_ = to_device(batch_.slopes);
  const gpu::DeviceBuffer k_cache_{cache_bytes(c_.head_dim)}, v_cache_{cache_bytes(c_.head_dim_v)},
      k_scale_{static_cast<size_t>(slots_) * c_.kv_heads * sizeof(float)},
      v_scale_{static_cast<size_t>(slots_) * c_.kv_heads * sizeof(float)},
      page_table_{static_cast<size_t>(requests_) * batch_.max_pages * sizeof(int32_t)},
      items_{items() * sizeof(WorkItem)}, cta_begin_{ctas_ * sizeof(int32_t)},
      cta_end_{ctas_ * sizeof(int32_t)}, merges_{ctas_ * sizeof(MergeItem)},
      tile_indptr_{static_cast<size_t>(requests_ + 1) * sizeof(int32_t)},
      partial_out_{static_cast<size_t>(2 * ctas_) * row_tile_ * c_.head_dim_v * sizeof(float)},
      partial_lse_{static_cast<size_t>(2 * ctas_) * row_tile_ * sizeof(float)},
      out_{some(rows() * c_.head_dim_v) * sizeof(uint16_t)}, lse_{some(rows()) * sizeof(float)};
};

void expect_fp64(const HostBatch& batch, const DeviceBatch& device) {
  const PortableCase& c = batch.test;
  const std::vector<uint16_t> out = device.out();
  const std::vector<float> lse = device.lse();
  double error = 0, norm = 0;
  for (int32_t r = 0; r < static_cast<int32_t>(c.requests.size()); ++r) {
    const int32_t q_len = c.requests[r].first;
    for (int32_t t = 0; t < q_len; t += std::max(1, q_len / 37)) {
      for (int32_t h = 0; h < c.q_heads; ++h) {
        double lse_expected = 0;
        const auto expected = batch.expected(r, t, h, lse_expected);
        const size_t row = static_cast<size_t>(batch.q_indptr[r] + t) * c.q_heads + h;
        ASSERT_TRUE(test::is_near(lse[row], lse_expected, 2e-3))
            << "request " << r << " token " << t << " head " << h;
        for (int32_t d = 0; d < c.head_dim_v; ++d) {
          const double difference = bf16_to_float(out[row * c.head_dim_v + d]) - expected[d];
          error += difference * difference;
          norm += expected[d] * expected[d];
        }
      }
    }
  }
  EXPECT_LE(std::sqrt(error), 5e-3 * std::sqrt(norm) + 1e-12);
}

TEST_P(PortableKernels, MatchFp64) {
  const auto& [c, decode] = GetParam();
  const HostBatch batch(c);
  Kernel attention = load("portable/attention", {std::to_string(c.head_dim),
                                                 std::to_string(c.head_dim_v), c.query, c.cache,
                                                 decode                ? "16"
                                                 : c.head_dim_v <= 128 ? "128"
                                                                       : "64"});
  const int32_t ctas = context->info().cores * 2, tile = attention.row_tile();
  const DeviceBatch device(batch, ctas, tile);
  load("portable/kv_write", {"bf16", c.cache})
      .launch({static_cast<uint32_t>((batch.all_keys * c.kv_heads + 7) / 8)},
              HeadWriteParams{device.write(), {}, {}, batch.all_keys}, nullptr);
  const AttentionParams params = device.attention();
  const PlanKernelParams<PlanParams> plan{{params.batch, params.work, 0}, {device.table()}, 3};
  load("portable/plan", {std::to_string(tile)}).launch({4}, plan, nullptr);
  attention.launch({static_cast<uint32_t>(ctas)}, params, nullptr);
  Merge(merge_variant(tile, DType::bf16, context->info().sm), *store).run(params, nullptr);
  gpu::synchronize(nullptr);
  expect_fp64(batch, device);
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
