// SPDX-License-Identifier: Apache-2.0
// Adds attention to other keys to a result, weighted by the log-sum-exps of both. A warp adds four
// (token, head) rows at a time, whose loads are in flight together.
#pragma once

#include "kernels/cuda/common/merge_states_params.h"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
struct MergeStatesConfig {
  using Params = MergeStatesParams;
  static constexpr int kWarps = 8;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kAtOnce = 4;  // rows of a warp
  static constexpr KernelTraits kTraits = {kWarps * 32, 0, kWarps* kAtOnce, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    if (params.live_rows && *params.live_rows == 0) return;
    const int tokens =
        params.q_indptr ? min(params.tokens, params.q_indptr[params.requests]) : params.tokens;
    const int64_t rows = static_cast<int64_t>(tokens) * params.heads;
    const auto groups = (rows + kAtOnce - 1) / kAtOnce;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    for (int64_t group = first; group < groups; group += gridDim.x * kWarps) {
      add_rows(params, group * kAtOnce, rows);
    }
  }

 private:
  struct Row {
    uint32_t* out;  // null: there is nothing to add
    const uint32_t* part;
    float own_weight, added_weight;
    float lse;
  };

  __device__ static Row row_at(const Params& params, int64_t row, float lse, float part_lse) {
    if (part_lse == -infinity()) return {};
    const int64_t token = row / params.heads;
    const int64_t head = row % params.heads;
    const float larger = fmaxf(lse, part_lse);
    const float own = __expf(lse - larger);
    const float added = __expf(part_lse - larger);
    return {reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(params.out) +
                                        token * params.out_token_stride +
                                        head * params.out_head_stride),
            reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(params.part) +
                                              token * params.part_token_stride +
                                              head * params.part_head_stride),
            own / (own + added), added / (own + added), larger + logf(own + added)};
  }

  __device__ static void add_rows(const Params& params, int64_t first, int64_t end) {
    const int lane = threadIdx.x % 32;
    float lse[kAtOnce], part_lse[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool exists = first + i < end;
      lse[i] = exists ? params.lse[first + i] : 0;
      part_lse[i] = exists ? params.part_lse[first + i] : -infinity();
    }
    Row rows[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) rows[i] = row_at(params, first + i, lse[i], part_lse[i]);
    for (int word = lane; word < params.v_dim / 2; word += 32) {
      uint32_t own[kAtOnce], added[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        own[i] = rows[i].out ? rows[i].out[word] : 0;
        added[i] = rows[i].out ? rows[i].part[word] : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!rows[i].out) continue;
        const float2 a = unpack<kType>(own[i]);
        const float2 b = unpack<kType>(added[i]);
        rows[i].out[word] = pack<kType>(rows[i].own_weight * a.x + rows[i].added_weight * b.x,
                                        rows[i].own_weight * a.y + rows[i].added_weight * b.y);
      }
    }
    __syncwarp();
    if (lane != 0) return;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (rows[i].out) params.lse[first + i] = rows[i].lse;
    }
  }
};

template <Type kType>
using Config = MergeStatesConfig<kType>;

}  // namespace fovea::kernels::cuda
