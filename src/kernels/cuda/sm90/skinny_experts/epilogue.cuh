// SPDX-License-Identifier: Apache-2.0
// Adds the sums of all warps that share k, and stores what they yield. A thread has two columns of
// a row: the gate and the up of an output, or two neighbours.
#pragma once

#include "kernels/cuda/common/activation.cuh"
#include "kernels/cuda/sm90/skinny_experts/config.cuh"

namespace fovea::kernels::cuda {

template <Product kProduct, bool kIsKn, int kColumns, int kStages>
struct ExpertOutputs {
  using Tiles = ExpertTiles<kIsKn, kColumns, kStages>;
  const SkinnyExpertsParams& params;
  typename Tiles::SharedMemory& shared;
  int row, first, second;  // columns in the tile
  int at;                  // the output
  int slot;                // gated: the expert
  bool live = false;
  float2 bias = {0, 0};
  float2 before = {0, 0};  // the output until now

  __device__ __forceinline__ ExpertOutputs(const SkinnyExpertsParams& given,
                                           typename Tiles::SharedMemory& memory, int tile, int of)
      : params(given), shared(memory), slot(of) {
    const int pair = threadIdx.x % Tiles::kOutputs;
    row = threadIdx.x / Tiles::kOutputs;
    first = pair * 2;
    second = first + 1;
    at = tile * kColumns + first;
    if constexpr (kProduct == gated) {
      at = tile * (kColumns / 2) + pair;
      // In [k, n], neighbours stay neighbours.
      if (!kIsKn || params.column_step == 1) {
        first = pair / 8 * 16 + pair % 8;
        second = first + 8;
      }
    }
    live = row < params.rows && at < params.n &&
           (kProduct == combined || shared.chosen.choice[slot][row] >= 0);
  }

  // Starts loads that would otherwise delay the end.
  __device__ __forceinline__ void load_bias() {
    if (!live) return;
    const Chosen& chosen = shared.chosen;
    if constexpr (kProduct == gated) {
      const ExpertMatrix* const matrix = params.weights + chosen.expert[slot] * params.matrices;
      const ExpertMatrix& of_ups = matrix[params.matrices - 1];
      const int column = at * params.column_step;
      if (matrix->bias) bias.x = matrix->bias[column];
      if (of_ups.bias) bias.y = of_ups.bias[column + params.up_column];
    } else {
#pragma unroll 4
      for (int choice = row * params.top_k; choice < (row + 1) * params.top_k; ++choice) {
        const int expert = chosen.id[choice];
        const float* const from = expert < 0 ? nullptr : params.weights[expert].bias;
        if (from == nullptr) continue;
        const float2 two = *reinterpret_cast<const float2*>(from + at);
        bias = {fmaf(chosen.factor[choice], two.x, bias.x),
                fmaf(chosen.factor[choice], two.y, bias.y)};
      }
    }
  }
  __device__ __forceinline__ float2* combined_at() const {
    return reinterpret_cast<float2*>(static_cast<float*>(params.out) + row * params.out_stride +
                                     at);
  }
  __device__ __forceinline__ void load_before() {
    if constexpr (kProduct == combined) {
      if (live && params.adds) before = __ldcg(combined_at());
    }
  }

  // Stores a warp's sums.
  __device__ __forceinline__ void store_sums(const float (&sums)[Tiles::kBlocks][4]) const {
    const int lane = threadIdx.x % 32;
    auto& to = shared.sums[threadIdx.x / 32];
#pragma unroll
    for (int block = 0; block < Tiles::kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[lane % 4 * 2 + i % 2][block * 16 + lane / 4 + i / 2 * 8] = sums[block][i];
      }
    }
  }

  // Returns the sums of the block's warps, or of the cluster's in the first block of one.
  __device__ __forceinline__ float2 sum(int rank) const {
    float2 sum = {0, 0};
    if (row >= params.rows) return sum;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sum.x += shared.sums[warp][row][first];
      sum.y += shared.sums[warp][row][second];
    }
    if (params.splits == 1) return sum;
    if (rank > 0) {
      store_in_cluster(&shared.received[rank - 1][threadIdx.x].x, 0, sum, shared.has_received);
      return sum;
    }
    shared.has_received.wait(0);
    for (int other = 1; other < params.splits; ++other) {
      const float2 more = shared.received[other - 1][threadIdx.x];
      sum.x += more.x;
      sum.y += more.y;
    }
    return sum;
  }
  // Bytes that the first block of a cluster receives.
  __device__ __forceinline__ int received_bytes() const {
    return (params.splits - 1) * params.rows * Tiles::kOutputs * static_cast<int>(sizeof(float2));
  }

  __device__ __forceinline__ void store(float2 sum) const {
    if (!live) return;
    if constexpr (kProduct == gated) {
      const int choice = shared.chosen.choice[slot][row];
      const float scale = shared.chosen.factor[choice];
      const float gate = fmaf(scale, sum.x, bias.x), up = fmaf(scale, sum.y, bias.y);
      static_cast<uint16_t*>(params.out)[choice * params.out_stride + at] =
          to_bf16(gated_value(params.activation, params.alpha, params.limit,
                              from_bf16(to_bf16(gate)), from_bf16(to_bf16(up))));
    } else {
      *combined_at() = {before.x + (sum.x + bias.x), before.y + (sum.y + bias.y)};
    }
  }
};

}  // namespace fovea::kernels::cuda
