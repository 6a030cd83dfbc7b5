// SPDX-License-Identifier: Apache-2.0
// Finds the chosen experts, their weights and the rows of each.
#pragma once

#include "kernels/cuda/sm90/skinny_experts/config.cuh"

namespace fovea::kernels::cuda {

// Each thread has two neighbouring experts. `Memory` is the shared memory of any tiles.
template <Product kProduct, bool kIsKn, class Memory>
struct ChoiceTable {
  const SkinnyExpertsParams& params;
  Memory& shared;
  // The thread's experts. Their addresses are loaded before the choices are known.
  const uint16_t* gate[2] = {};
  const uint16_t* up[2] = {};

  __device__ __forceinline__ int expert(int i) const { return threadIdx.x * 2 + i; }

  // Called before the choices are read.
  __device__ __forceinline__ void prepare() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shared.marks[expert(i)] = 0;
      if (expert(i) >= params.experts) continue;
      const ExpertMatrix* const matrix = params.weights + expert(i) * params.matrices;
      gate[i] = static_cast<const uint16_t*>(matrix->weight);
      if constexpr (kProduct == gated) {
        const int64_t offset =
            static_cast<int64_t>(params.up_column) * (kIsKn ? 1 : params.weight_stride);
        up[i] = static_cast<const uint16_t*>(matrix[params.matrices - 1].weight) + offset;
      }
    }
    __syncthreads();
  }

  // Fills shared.chosen. Loads past the L1 cache, which may hold the choices of another layer.
  __device__ __forceinline__ void find() const {
    Chosen& chosen = shared.chosen;
    const int thread = threadIdx.x, row = thread / params.top_k;
    const int id = thread < params.rows * params.top_k ? __ldcg(params.ids + thread) : -1;
    const bool counts = id >= 0 && id < params.experts;
    if (thread < kMaxSkinnyChoices) chosen.id[thread] = static_cast<int16_t>(counts ? id : -1);
    if (counts) {
      atomicOr(&shared.marks[id], 1);
      chosen.factor[thread] = params.scale ? __ldcg(params.scale + thread) : 1.0f;
    }
    __syncthreads();
    const bool marked[2] = {shared.marks[expert(0)] != 0, shared.marks[expert(1)] != 0};
    const uint32_t even = __ballot_sync(~0u, marked[0]), odd = __ballot_sync(~0u, marked[1]);
    const int warp = thread / 32;
    if (thread % 32 == 0) shared.warp_counts[warp] = __popc(even) + __popc(odd);
    __syncthreads();
    const uint32_t below = (1u << thread % 32) - 1;
    int slot = __popc(even & below) + __popc(odd & below), count = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      if (other == warp) slot += count;
      count += shared.warp_counts[other];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!marked[i]) continue;
      chosen.gate[slot] = gate[i];
      if constexpr (kProduct == gated) chosen.up[slot] = up[i];
      chosen.expert[slot] = static_cast<int16_t>(expert(i));
      *reinterpret_cast<int2*>(chosen.choice[slot]) = {-1, -1};
      shared.marks[expert(i)] = slot++;
    }
    if (thread == 0) chosen.count = count;
    __syncthreads();
    if (counts) chosen.choice[shared.marks[id]][row] = static_cast<int8_t>(thread);
    __syncthreads();
  }
};

}  // namespace fovea::kernels::cuda
