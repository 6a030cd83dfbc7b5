// SPDX-License-Identifier: Apache-2.0
// Loads rows of keys, queries and log decays of a lane's two tokens, and sums the decays.
#pragma once

#include "kernels/cuda/common/scan.cuh"
#include "kernels/cuda/sm90/kda_chunks/config.cuh"

namespace fovea::kernels::cuda {

constexpr float kLog2E = 1.4426950408889634f;
// Decays below e^-17 (4e-8) count as e^-17, so that the decays of eight tokens and their inverses,
// relative to the middle, are numbers of f32.
constexpr float kMinLogDecay = -17;
constexpr float kNormEpsilon = 1e-6f;

// Asks for the rows of a lane's two tokens; those from `count` on are zeros. `from` is the chunk's
// first row.
__device__ __forceinline__ void request_rows(LaneRows& to, const uint16_t* from, int64_t stride,
                                             int count) {
  const PlaceAnew place;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = place.row + 8 * half;
    const uint16_t* const row = from + (token < count ? token : 0) * stride + first_column(place);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      copy_async(&to[group][half][place.lane], row + group * 32, token < count ? 16 : 0);
    }
  }
}

// Returns 1 / |row| of a lane's token, at most 1000.
__device__ __forceinline__ float inverse_norm(const LaneRows& rows, int half) {
  const PlaceAnew place;
  float squares = 0;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const uint4 row = rows[group][half][place.lane];
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (const uint32_t word : words) {
      const float2 pair = unpack<bf16>(word);
      squares = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, squares));
    }
  }
  squares += __shfl_xor_sync(~0u, squares, 1);
  squares += __shfl_xor_sync(~0u, squares, 2);
  return rsqrtf(squares + kNormEpsilon);
}

// ln of the decays of two tokens in 8 columns, and of 8 tokens around each of them.
struct LaneDecays {
  float logs[2][8], totals[2][8];

  __device__ __forceinline__ void load(const float* from, int stride, int count) {
    const PlaceAnew place;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = place.row + 8 * half;
      float4 low = {}, high = {};
      if (token < count) {
        const auto* const at =
            reinterpret_cast<const float4*>(from + token * stride + first_column(place));
        low = at[0];
        high = at[1];
      }
      const float loaded[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) logs[half][i] = fmaxf(loaded[i], kMinLogDecay);
    }
  }
  // Sums the logs of eight tokens, up to each one and in total.
  __device__ __forceinline__ void sum() {
    const PlaceAnew place;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& sum = logs[half][i];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          const float before = __shfl_up_sync(~0u, sum, step);
          if (place.lane >= step) sum += before;
        }
        totals[half][i] = __shfl_sync(~0u, sum, 28 + place.lane % 4);
      }
    }
  }
};

// Sums the log decays of each warp's tokens, four columns a lane.
__device__ __forceinline__ void sum_decays(ChunkMemory& shared, const float* log_decay, int stride,
                                           int count) {
  const PlaceAnew place;
  const float* at = log_decay + place.warp * kTriangle * stride + 4 * place.lane;
  const int tokens = count - place.warp * kTriangle;
  float4 rows[kTriangle];
#pragma unroll
  for (int i = 0; i < kTriangle; ++i, at += stride) {
    rows[i] = i < tokens ? *reinterpret_cast<const float4*>(at) : float4{};
  }
  float4 sum = {};
#pragma unroll
  for (int i = 0; i < kTriangle; ++i) {
    sum.x += fmaxf(rows[i].x, kMinLogDecay);
    sum.y += fmaxf(rows[i].y, kMinLogDecay);
    sum.z += fmaxf(rows[i].z, kMinLogDecay);
    sum.w += fmaxf(rows[i].w, kMinLogDecay);
  }
  *reinterpret_cast<float4*>(&shared.sums[place.warp][4 * place.lane]) = sum;
}

// Finds the decays around the tokens of each warp, a thread for each column. Returns that of the
// whole chunk.
__device__ __forceinline__ float find_decays(ChunkMemory& shared) {
  const int column = thread_of_worker();
  float logs[kTriangles], before = 0, after = 0;
#pragma unroll
  for (int i = 0; i < kTriangles; ++i) logs[i] = kLog2E * shared.sums[i][column];
#pragma unroll
  for (int i = 0; i < kTriangles; ++i) {
    shared.decays.before[i][column] = exp2_fast(before);
    before += logs[i];
    const int back = kTriangles - 1 - i;
    shared.decays.after[back][column] = exp2_fast(after);
    after += logs[back];
  }
#pragma unroll
  for (int i = 1; i < kTriangles - 1; ++i) {
    shared.across[i - 1][column] = static_cast<uint16_t>(pack<f16>(exp2_fast(logs[i]), 0));
  }
  return exp2_fast(before);
}

}  // namespace fovea::kernels::cuda
