// SPDX-License-Identifier: Apache-2.0
#include "attention/host/row_copy.h"

#include <array>
#include <cstring>

#include "core/float_types.h"
#include "kernels/mla_row.h"

namespace fovea {
namespace {

void convert(const char* from, DType from_dtype, char* to, DType to_dtype, int32_t dim) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(dim) * dtype_bytes(to_dtype));
    return;
  }
  for (int32_t d = 0; d < dim; ++d) store_float(to, to_dtype, d, load_float(from, from_dtype, d));
}

// Returns all codes of an fp8 format as f32: a look-up is faster than decoding.
template <DType dtype>
const std::array<float, 256>& fp8_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table;
    for (int code = 0; code < 256; ++code) {
      const auto byte = static_cast<uint8_t>(code);
      table[static_cast<size_t>(code)] = load_float(&byte, dtype, 0);
    }
    return table;
  }();
  return values;
}

void load_fp8(const char* from, const std::array<float, 256>& values, int32_t dim, float* to) {
  for (int32_t d = 0; d < dim; ++d) to[d] = values[static_cast<uint8_t>(from[d])];
}

void load_scaled(const char* from, DType dtype, float scale, int32_t dim, float* to) {
  if (dtype == DType::f8e4m3) {
    load_fp8(from, fp8_values<DType::f8e4m3>(), dim, to);
  } else if (dtype == DType::f8e5m2) {
    load_fp8(from, fp8_values<DType::f8e5m2>(), dim, to);
  } else {
    convert(from, dtype, reinterpret_cast<char*>(to), DType::f32, dim);
  }
  if (scale == 1.0f) return;
  for (int32_t d = 0; d < dim; ++d) to[d] *= scale;
}

float scale_of(const KvLayerView& cache, int64_t slot) {
  if (cache.scale == KvScale::none) return 1.0f;
  return cache.k_scale[cache.scale == KvScale::per_token_head ? slot : 0];
}

void load_fp8_row(const char* row, float* to) {
  using namespace kernels;
  for (int32_t group = 0; group < kMlaRowLatent / kMlaRowScaleGroup; ++group) {
    const float scale = load_float(row + kMlaRowScaleOffset, DType::f32, group);
    const int32_t at = group * kMlaRowScaleGroup;
    load_scaled(row + at, DType::f8e4m3, scale, kMlaRowScaleGroup, to + at);
  }
  load_scaled(row + kMlaRowRopeOffset, DType::bf16, 1.0f, kMlaRowRope, to + kMlaRowLatent);
}

}  // namespace

void copy_rows(const RowCopy& copy, ThreadPool& threads) {
  threads.parallel_for(copy.tokens, [&](int64_t token, int) {
    for (int32_t head = 0; head < copy.heads; ++head) {
      convert(row_address(copy.from, token, head), copy.from.dtype,
              row_address(copy.to, token, head), copy.to.dtype, copy.dim);
    }
  });
}

void gather_latents(const LatentGather& gather, ThreadPool& threads) {
  threads.parallel_for(gather.rows, [&](int64_t i, int) {
    const int64_t slot = gather.table.slot(gather.row, gather.first + i);
    const char* from = k_address(gather.cache, slot, 0);
    float* to = gather.to + i * gather.dim;
    if (gather.cache.layout == KvLayout::mla_fp8_rows) {
      load_fp8_row(from, to);
    } else {
      load_scaled(from, gather.cache.dtype, scale_of(gather.cache, slot), gather.dim, to);
    }
  });
}

}  // namespace fovea
