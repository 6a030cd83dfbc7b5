// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_latent_check.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/float_types.h"

namespace fovea::bench {
namespace {

using kernels::cuda::RowError;
using kernels::cuda::SampledRow;

// Reads `count` 16-bit values from element `at` on.
std::vector<double> read_values(const void* device, int64_t at, int64_t count, DType dtype,
                                Stream stream) {
  std::vector<uint16_t> bits(static_cast<size_t>(count));
  gpu::copy_to_host(bits.data(), static_cast<const uint16_t*>(device) + at,
                    bits.size() * sizeof(uint16_t), stream);
  gpu::synchronize(stream);
  std::vector<double> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) {
    values[i] = load_float(bits.data(), dtype, static_cast<int64_t>(i));
  }
  return values;
}

// Reads a request's cache rows in order.
std::vector<double> read_latents(const GpuCase& config, const CallOutput& call, int32_t request,
                                 Stream stream) {
  const KvLayerView& keys = call.keys;
  const int32_t length = config.requests[static_cast<size_t>(request)].kv_len;
  std::vector<int32_t> slots(static_cast<size_t>(length));
  gpu::copy_to_host(slots.data(), call.slots + int64_t{request} * config.longest_kv(),
                    slots.size() * sizeof(int32_t), stream);
  gpu::synchronize(stream);
  std::vector<double> rows;
  for (int32_t first = 0; first < length; first += keys.page_size) {
    const int64_t page = slots[static_cast<size_t>(first)] / keys.page_size;
    const int32_t count = std::min(keys.page_size, length - first);
    const auto part = read_values(keys.k, page * keys.k_page_stride, count * keys.k_token_stride,
                                  config.kv_dtype, stream);
    rows.insert(rows.end(), part.begin(), part.end());
  }
  return rows;
}

double dot(const double* a, const double* b, int32_t count) {
  double sum = 0;
  for (int32_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// Computes the absorbed form, without the keys of a head.
std::vector<double> expected_row(const AttentionSpec& spec, const std::vector<double>& q,
                                 const std::vector<double>& latents, int32_t keys,
                                 const std::vector<double>& w_uk, const std::vector<double>& w_uv) {
  const int32_t rank = spec.mla.kv_lora_rank, row = spec.mla.row_dim();
  std::vector<double> query(static_cast<size_t>(row));
  for (int32_t n = 0; n < spec.mla.nope_dim; ++n) {
    for (int32_t i = 0; i < rank; ++i) query[i] += q[n] * w_uk[int64_t{n} * rank + i];
  }
  std::copy_n(q.begin() + spec.mla.nope_dim, spec.mla.rope_dim, query.begin() + rank);
  std::vector<double> weights(static_cast<size_t>(keys)), latent(static_cast<size_t>(rank));
  for (int32_t key = 0; key < keys; ++key) {
    weights[key] = spec.scores.softmax_scale * dot(query.data(), &latents[int64_t{key} * row], row);
  }
  const double largest = *std::ranges::max_element(weights);
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - largest);
  for (int32_t key = 0; key < keys; ++key) {
    const double weight = weights[key] / sum;
    for (int32_t i = 0; i < rank; ++i) latent[i] += weight * latents[int64_t{key} * row + i];
  }
  std::vector<double> out(static_cast<size_t>(spec.mla.v_dim));
  for (int32_t n = 0; n < spec.mla.v_dim; ++n) {
    out[n] = dot(&w_uv[int64_t{n} * rank], latent.data(), rank);
  }
  return out;
}

}  // namespace

std::vector<RowError> latent_row_errors(const GpuCase& config, const CallOutput& call,
                                        std::span<const SampledRow> rows, Stream stream) {
  const AttentionSpec& spec = config.spec;
  std::map<int32_t, std::vector<double>> latents;  // by request
  std::vector<RowError> errors;
  for (const SampledRow& row : rows) {
    std::vector<double>& keys = latents[row.request];
    if (keys.empty()) keys = read_latents(config, call, row.request, stream);
    const int64_t at = int64_t{row.token} * spec.q_heads + row.q_head;
    const auto weights = [&](const void* all, int32_t width) {
      const int64_t size = int64_t{width} * spec.mla.kv_lora_rank;
      return read_values(all, row.q_head * size, size, spec.q_dtype, stream);
    };
    const std::vector<double> want = expected_row(
        spec, read_values(call.q, at * config.q_width(), config.q_width(), spec.q_dtype, stream),
        keys, row.key_end, weights(call.w_uk, spec.mla.nope_dim),
        weights(call.w_uv, spec.mla.v_dim));
    const std::vector<double> got =
        read_values(call.out, at * config.out_width(), config.out_width(), call.out_dtype, stream);
    RowError error{};
    for (size_t i = 0; i < want.size(); ++i) {
      error.squared_error += (got[i] - want[i]) * (got[i] - want[i]);
      error.squared_norm += want[i] * want[i];
    }
    errors.push_back(error);
  }
  return errors;
}

}  // namespace fovea::bench
