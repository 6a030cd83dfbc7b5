// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_output_check.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include "bench/gpu_latent_check.h"
#include "kernels/cuda/common/measure_params.h"

namespace fovea::bench {
namespace {

using namespace kernels::cuda;

constexpr uint32_t kSampledRows = 128;
constexpr uint32_t kSampledLatentRows = 16;  // the host computes these
// Far above rounding errors, far below any bug. Products of e4m3 round the weights to 2^-4.
constexpr double kWrong = 0.02, kWrongFp8 = 0.1;
constexpr double kWorstRow = 4;

// Samples first and last tokens, and random tokens of random requests.
std::vector<SampledRow> sample_rows(const GpuCase& config, std::span<const int32_t> q_indptr) {
  std::mt19937 random(11);
  const auto below = [&](int32_t bound) {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(bound));
  };
  std::vector<SampledRow> rows;
  for (uint32_t i = 0; i < (config.has_mla_weights() ? kSampledLatentRows : kSampledRows); ++i) {
    SampledRow row{};
    if (i % 2 == 0) {
      row.request = below(static_cast<int32_t>(config.requests.size()));
    } else {
      const auto after = std::ranges::upper_bound(q_indptr, below(config.tokens()));
      row.request = static_cast<int32_t>(after - q_indptr.begin()) - 1;
    }
    const RequestLengths& lengths = config.requests[static_cast<size_t>(row.request)];
    const int32_t q_len = lengths.q_len;
    const int32_t token = i % 8 == 0 ? q_len - 1 : i % 8 == 1 ? 0 : below(q_len);
    row.token = q_indptr[static_cast<size_t>(row.request)] + token;
    row.q_head = below(config.spec.q_heads);
    std::tie(row.key_begin, row.key_end) = config.visible(lengths, token);
    rows.push_back(row);
  }
  return rows;
}

std::vector<RowError> row_errors(const GpuCase& config, const CallOutput& call,
                                 const std::vector<SampledRow>& sampled, MeasureKernels& kernels,
                                 Stream stream) {
  const gpu::DeviceBuffer rows(sampled.size() * sizeof(SampledRow));
  gpu::copy_to_device(rows.data(), sampled.data(), rows.bytes(), stream);
  const gpu::DeviceBuffer errors(sampled.size() * sizeof(RowError));
  const gpu::DeviceBuffer scores(sampled.size() * static_cast<size_t>(config.longest_kv()) *
                                 sizeof(double));
  const KvLayerView& keys = call.keys;
  const bool one_scale = keys.scale == KvScale::per_tensor;
  const float scale = config.spec.scores.softmax_scale;
  const AttentionRowsParams params{
      .rows = rows.data<SampledRow>(),
      .errors = errors.data<RowError>(),
      .scores = scores.data<double>(),
      .scores_stride = config.longest_kv(),
      .q = call.q,
      .out = call.out,
      .k = keys.k,
      .v = keys.v,
      .k_page_stride = keys.k_page_stride,
      .k_token_stride = keys.k_token_stride,
      .k_head_stride = keys.k_head_stride,
      .v_page_stride = keys.v_page_stride,
      .v_token_stride = keys.v_token_stride,
      .v_head_stride = keys.v_head_stride,
      .k_scale = keys.k_scale,
      .v_scale = keys.v_scale,
      .scale_slot_stride = one_scale ? 0 : config.spec.kv_heads,
      .scale_head_stride = one_scale ? 0 : 1,
      .slots = call.slots,
      .slots_stride = config.longest_kv(),
      .page_size = keys.page_size,
      .mla_fp8_rows = keys.layout == KvLayout::mla_fp8_rows,
      .q_heads = config.spec.q_heads,
      .kv_heads = config.spec.kv_heads,
      .head_dim = cached_key_dim(config.spec),
      .head_dim_v = cached_value_dim(config.spec),
      .scale = scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(cached_key_dim(config.spec))),
      .logit_cap = config.spec.scores.logit_cap,
      .sinks = call.sinks,
      .alibi_slopes = call.alibi_slopes};
  kernels
      .get("measure/attention_rows",
           {variant_value(config.spec.q_dtype), variant_value(config.kv_dtype),
            variant_value(call.out_dtype)})
      .launch({kSampledRows, 1}, params, stream);
  std::vector<RowError> host(sampled.size());
  gpu::copy_to_host(host.data(), errors.data(), errors.bytes(), stream);
  gpu::synchronize(stream);
  return host;
}

}  // namespace

OutputError check_output(const GpuCase& config, const CallOutput& call, MeasureKernels& kernels,
                         Stream stream) {
  const int64_t elements = int64_t{config.tokens()} * config.spec.q_heads * config.out_width();
  const gpu::DeviceBuffer found(sizeof(uint64_t));
  gpu::fill_bytes(found.data(), 0, found.bytes(), stream);
  kernels.get("measure/not_finite", {variant_value(call.out_dtype)})
      .launch(kernels.grid(), NotFiniteParams{call.out, elements, found.data<uint64_t>()}, stream);

  const std::vector<SampledRow> rows = sample_rows(config, call.q_indptr);
  const std::vector<RowError> host = config.has_mla_weights()
                                         ? latent_row_errors(config, call, rows, stream)
                                         : row_errors(config, call, rows, kernels, stream);
  uint64_t not_finite = 0;
  gpu::copy_to_host(&not_finite, found.data(), found.bytes(), stream);
  gpu::synchronize(stream);
  OutputError error;
  double squared = 0;
  double norm = 0;
  for (const RowError& row : host) {
    squared += row.squared_error;
    norm += row.squared_norm;
    error.worst_row = std::max(error.worst_row, std::sqrt(row.squared_error / row.squared_norm));
  }
  error.relative = std::sqrt(squared / norm);
  const double limit = config.fp8_products() ? kWrongFp8 : kWrong;
  if (not_finite > 0) {
    error.problem = fmt::format("{} of {} output elements are not finite or were not written",
                                not_finite, elements);
  } else if (!(error.relative < limit) || !(error.worst_row < kWorstRow * limit)) {
    error.problem = fmt::format("relative error {:.1e}, of the worst row {:.1e}", error.relative,
                                error.worst_row);
  }
  return error;
}

}  // namespace fovea::bench
