// SPDX-License-Identifier: Apache-2.0
// Moves rows between the cache, the products and attention.
#pragma once

#include "kernels/cuda/portable/mla_prefill/config.cuh"

namespace fovea::kernels::cuda {

// Returns eight e4m3 values times a scale.
template <Type kTo>
__device__ inline uint4 dequantised(uint2 codes, float scale) {
  const uint4 exact = widen_chunk<f8e4m3, kTo>(codes.x, codes.y);
  const uint32_t words[4] = {exact.x, exact.y, exact.z, exact.w};
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 values = unpack<kTo>(words[i]);
    out[i] = pack<kTo>(values.x * scale, values.y * scale);
  }
  return {out[0], out[1], out[2], out[3]};
}

// A row of the cache, read as chunks of eight 16-bit values.
template <Type kCache, Type kTo>
struct CacheRow {
  const char* row;
  const MlaGatherParams& params;
  float scale;  // scale of e4m3 rows other than fp8_rows

  __device__ uint4 latent(int chunk) const {
    if constexpr (kCache != f8e4m3) {
      return reinterpret_cast<const uint4*>(row)[chunk];
    } else {
      const uint2 codes = reinterpret_cast<const uint2*>(row)[chunk];
      const float own = params.fp8_rows
                            ? reinterpret_cast<const float*>(
                                  row + kMlaRowScaleOffset)[chunk * kChunk / kMlaRowScaleGroup]
                            : scale;
      return dequantised<kTo>(codes, own);
    }
  }
  __device__ uint4 rope(int chunk) const {
    if constexpr (kCache == f8e4m3) {
      if (params.fp8_rows) {
        return bf16_as<kTo>(reinterpret_cast<const uint4*>(row + kMlaRowRopeOffset)[chunk]);
      }
    }
    return tail(params.kv_lora_rank / kChunk + chunk);
  }

 private:
  __device__ uint4 tail(int chunk) const {
    if constexpr (kCache != f8e4m3) {
      return reinterpret_cast<const uint4*>(row)[chunk];
    } else {
      return dequantised<kTo>(reinterpret_cast<const uint2*>(row)[chunk], scale);
    }
  }
};

template <Type kCache, Type kTo>
struct GatherConfig {
  using Params = MlaGatherParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kRowWarps * 32, 0, kRowWarps, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int total = params.row_indptr[params.requests];
    const int rows = min(max(total - params.first_row, 0), params.max_rows);
    if (params.of_chunk && blockIdx.x == 0) {
      describe_chunk(params.chunk, params.requests, params.q_indptr, params.row_indptr,
                     params.first_row);
    }
    if (params.part_lse) {
      const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
      for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
           i < params.part_rows; i += threads) {
        params.part_lse[i] = -infinity();
      }
    }
    // If little is copied, a warp works on several rows at a time.
    if (params.offsets) {
      for_each_row<8>(rows, [&](int64_t row) { gather_row<8>(params, row); });
    } else {
      for_each_row(rows, [&](int64_t row) { gather_row<32>(params, row); });
    }
  }

 private:
  template <int kLanes>
  __device__ static void gather_row(const Params& params, int64_t row) {
    const int at = params.first_row + static_cast<int>(row);
    const int request = find_request(params.row_indptr, params.requests, at);
    const int lane = threadIdx.x % kLanes;
    if (!params.up_requests[request]) {
      if (params.offsets && lane == 0) params.offsets[row] = -1;
      return;
    }
    int key = at - params.row_indptr[request];
    if (!params.of_chunk) {
      key += params.kv_lens[request] - (params.q_indptr[request + 1] - params.q_indptr[request]);
    }
    const int64_t page =
        params.page_table[request * params.page_table_stride + key / params.page_size];
    const int64_t place = key % params.page_size;
    const int64_t element = page * params.page_stride + place * params.token_stride;
    const int64_t slot = page * params.page_size + place;
    const CacheRow<kCache, kTo> from = {
        static_cast<const char*>(params.cache) + element * type_bytes(kCache), params,
        params.scale ? params.scale[slot * params.scale_slot_stride] : 1.0f};
    const int chunks = params.rope_dim / kChunk;
    if (params.offsets) {
      if (lane == 0) params.offsets[row] = element;
    } else {
      const int latents = params.kv_lora_rank / kChunk;
      uint4* const to = static_cast<uint4*>(params.rows) + row * (latents + chunks);
      for (int i = lane; i < latents; i += kLanes) to[i] = from.latent(i);
      for (int i = lane; i < chunks; i += kLanes) to[latents + i] = from.rope(i);
    }
    if (!params.keys) return;
    const int dim = params.nope_dim + params.rope_dim;
    uint16_t* const keys =
        static_cast<uint16_t*>(params.keys) + row * params.heads * dim + params.nope_dim;
    for (int i = lane; i < params.heads * chunks; i += kLanes) {
      reinterpret_cast<uint4*>(keys + i / chunks * dim)[i % chunks] = from.rope(i % chunks);
    }
  }
};

struct JoinConfig {
  using Params = MlaJoinParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kRowWarps * 32, 0, kRowWarps, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    for_each_row(static_cast<int64_t>(params.tokens) * params.heads, [&](int64_t row) {
      const int64_t token = row / params.heads;
      const int64_t head = row % params.heads;
      uint16_t* const out =
          static_cast<uint16_t*>(params.out) + row * (params.nope_dim + params.rope_dim);
      copy_row(out,
               static_cast<const uint16_t*>(params.nope) + token * params.nope_token_stride +
                   head * params.nope_head_stride,
               params.nope_dim);
      copy_row(out + params.nope_dim,
               static_cast<const uint16_t*>(params.rope) + token * params.rope_token_stride +
                   head * params.rope_head_stride,
               params.rope_dim);
    });
  }
};

}  // namespace fovea::kernels::cuda
