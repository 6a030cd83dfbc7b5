// SPDX-License-Identifier: Apache-2.0
#include "kernels/kv_write.h"

#include <algorithm>
#include <cfloat>

#include "core/check.h"
#include "core/float_types.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd/kv_write.h"
#include "kernels/mla_row.h"

namespace fovea::kernels::cpu {
namespace {

class Writer {
 public:
  Writer(const KvWriteParams& params, Isa isa)
      : params_(params),
        write_row_(FOVEA_FOR_ISA(isa, write_cache_row)),
        largest_magnitude_(FOVEA_FOR_ISA(isa, largest_magnitude)) {}

  void write_token(int64_t token) const {
    int64_t slot = params_.slots[token];
    if (slot >= 0 && params_.slot_map) slot = params_.slot_map[slot];
    if (slot < 0) return;
    check_argument(slot < params_.cache.slots, "slot {} of token {} is beyond the cache's {} slots",
                   slot, token, params_.cache.slots);
    switch (params_.cache.layout) {
      case KvLayout::mha:
        return write_heads(token, slot);
      case KvLayout::mla:
        return write_latent(token, slot);
      case KvLayout::mla_fp8_rows:
        return write_fp8_row(token, slot);
    }
  }

 private:
  struct Source {
    const void* data;
    DType dtype;
    int32_t dim;
  };

  Source source(const HeadRows& rows, int64_t token, int64_t head, int32_t dim) const {
    return {row_address(rows, token, head), rows.dtype, dim};
  }

  // Returns the scale that maps `largest` to the largest number of `dtype`.
  float scale_for(float largest, DType dtype) const {
    const float scale = largest / largest_finite(dtype);
    return scale < FLT_MIN ? 1.0f : scale;
  }

  float largest(const Source& from) const {
    return largest_magnitude_(from.data, from.dtype, from.dim);
  }

  void store(const Source& from, char* to, DType dtype, float scale, int64_t slot) const {
    const bool dummy_page = slot < params_.cache.page_size;
    const float limit = dummy_page ? largest_finite(dtype) : 0;
    write_row_({from.data, from.dtype, to, dtype, from.dim, scale, limit});
  }

  float given_scale(const float* scales, int64_t head) const {
    if (params_.cache.scale == KvScale::per_tensor) return scales[0];
    if (params_.cache.scale == KvScale::per_head) return scales[head];
    return 1;
  }

  void write_head(const Source& from, char* to, float* scales, int64_t slot, int64_t head) const {
    float scale = given_scale(scales, head);
    if (params_.cache.scale == KvScale::per_token_head) {
      scale = scale_for(largest(from), params_.cache.dtype);
      scales[slot * params_.kv_heads + head] = scale;
    }
    store(from, to, params_.cache.dtype, scale, slot);
  }

  void write_heads(int64_t token, int64_t slot) const {
    const KvLayerView& cache = params_.cache;
    for (int32_t head = 0; head < params_.kv_heads; ++head) {
      write_head(source(params_.k, token, head, params_.head_dim), k_address(cache, slot, head),
                 cache.k_scale, slot, head);
      write_head(source(params_.v, token, head, params_.head_dim_v), v_address(cache, slot, head),
                 cache.v_scale, slot, head);
    }
  }

  // Writes a latent and its rotary key as one row with one scale.
  void write_latent(int64_t token, int64_t slot) const {
    const KvLayerView& cache = params_.cache;
    const Source latent = source(params_.k, token, 0, params_.head_dim);
    const Source rope = params_.v ? source(params_.v, token, 0, params_.head_dim_v)
                                  : Source{nullptr, DType::f32, 0};
    float scale = given_scale(cache.k_scale, 0);
    if (cache.scale == KvScale::per_token_head) {
      scale = scale_for(std::max(largest(latent), largest(rope)), cache.dtype);
      cache.k_scale[slot] = scale;
    }
    char* to = k_address(cache, slot, 0);
    store(latent, to, cache.dtype, scale, slot);
    to += latent.dim * static_cast<int64_t>(dtype_bytes(cache.dtype));
    store(rope, to, cache.dtype, scale, slot);
  }

  void write_fp8_row(int64_t token, int64_t slot) const {
    char* to = k_address(params_.cache, slot, 0);
    const Source latent = source(params_.k, token, 0, kMlaRowLatent);
    const auto group_bytes = kMlaRowScaleGroup * static_cast<int64_t>(dtype_bytes(latent.dtype));
    for (int64_t group = 0; group < kMlaRowLatent / kMlaRowScaleGroup; ++group) {
      const Source part = {static_cast<const char*>(latent.data) + group * group_bytes,
                           latent.dtype, kMlaRowScaleGroup};
      const float scale = scale_for(largest(part), DType::f8e4m3);
      store(part, to + group * kMlaRowScaleGroup, DType::f8e4m3, scale, slot);
      store_float(to + kMlaRowScaleOffset, DType::f32, group, scale);
    }
    store(source(params_.v, token, 0, kMlaRowRope), to + kMlaRowRopeOffset, DType::bf16, 1, slot);
  }

  const KvWriteParams& params_;
  decltype(&baseline::write_cache_row) write_row_;
  decltype(&baseline::largest_magnitude) largest_magnitude_;
};

bool can_be_written(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

}  // namespace

void kv_write(const KvWriteParams& params, ThreadPool& threads, Isa isa) {
  if (params.tokens == 0) return;
  check_argument(can_be_written(params.k.dtype), "k is {}, must be fp32, fp16 or bf16",
                 dtype_name(params.k.dtype));
  check_argument(!params.v || can_be_written(params.v.dtype), "v is {}, must be fp32, fp16 or bf16",
                 dtype_name(params.v.dtype));
  if (params.cache.layout == KvLayout::mla_fp8_rows) {
    check_argument(params.head_dim == kMlaRowLatent && params.v && params.head_dim_v == kMlaRowRope,
                   "656-byte rows hold 512 + 64 values, k and v bring {} + {}", params.head_dim,
                   params.v ? params.head_dim_v : 0);
  }
  const Writer writer(params, isa);
  const int64_t elements =
      std::max<int64_t>(1, int64_t{params.kv_heads} * (params.head_dim + params.head_dim_v));
  parallel_ranges(threads, params.tokens, 16384 / elements, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) writer.write_token(token);
  });
}

}  // namespace fovea::kernels::cpu
