// SPDX-License-Identifier: Apache-2.0
// Joins the results of the passes over shared prefixes, which may be in parts, with the pass over
// the other keys. CTAs (i, any) share the rows of request i. A warp takes a row, and its lanes the
// columns. Requests in no group stay unchanged.
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/prefix_params.h"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

template <Type kOut>
struct PrefixJoinConfig {
  using Params = PrefixJoinParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kJoinWarps * 32, 0, 0, 0};

  // One row of q.
  struct Row {
    int request;
    int token;
    int head;
    __device__ int64_t place(const Params& params) const {
      return static_cast<int64_t>(token) * params.batch.q_heads + head;
    }
  };

  // The states that a level has for a row, as rows of `out` and `lse`.
  struct States {
    const float* out;
    const float* lse;
    int64_t first;  // row of the first state; the second is `step` rows on, later ones 2 * step
    int step;
    int count;
    __device__ int64_t at(int part) const {
      return part == 0 ? first : first + static_cast<int64_t>(2 * part - 1) * step;
    }
  };

  // Finds the states of a level whose group has the row. It reads the output of the plan from the
  // L2, because it may run before the wait.
  __device__ static States find_states(const Params& params, const PrefixState& state,
                                       const Row& row) {
    const States whole = {state.out, state.lse, row.place(params), 0, 1};
    if (!state.parts) return whole;
    const int group = params.batch.q_heads / params.batch.kv_heads;
    const int begin = __ldcg(state.groups.begins + row.request);
    const int group_row =
        (row.token - __ldcg(state.groups.q_indptr + begin)) * group + row.head % group;
    const int tile = __ldcg(state.tile_indptr + begin) + group_row / state.row_tile;
    const int2 parts = __ldcg(reinterpret_cast<const int2*>(state.parts) +
                              tile * params.batch.kv_heads + row.head / group);
    if (parts.y == 1) return whole;
    const int64_t first =
        static_cast<int64_t>(parts.x) * state.row_tile + group_row % state.row_tile;
    return {state.part_out, state.part_lse, first, state.row_tile, parts.y};
  }

  // The states of a row in shared memory, so that one copy of the code serves all levels.
  struct Found {
    States levels[kPrefixLevels];
    int count;
  };
  __device__ static void find_all(const Params& params, const Row& row, int end, Found& found) {
    int count = 0;
    int next = end;
#pragma unroll 1
    for (int i = params.levels - 1; i >= 0; --i) {
      const int first = __ldcg(params.states[i].groups.first_keys + row.request);
      if (next > first) {
        const States states = find_states(params, params.states[i], row);
        if (threadIdx.x % 32 == 0) found.levels[count] = states;
        ++count;
      }
      next = first;
    }
    if (threadIdx.x % 32 == 0) found.count = count;
    __syncwarp();
  }

  // Calls visit(lse) for the states of the row; each lane visits its own share.
  template <typename Visit>
  __device__ __forceinline__ static void for_lane(const Found& found, Visit visit) {
#pragma unroll 1
    for (int level = 0; level < found.count; ++level) {
      const States& states = found.levels[level];
#pragma unroll 1
      for (int part = threadIdx.x % 32; part < states.count; part += 32)
        visit(states.lse[states.at(part)]);
    }
  }

  __device__ static float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
  }

  __device__ static void join_row(const Params& params, const Found& found, const Row& row) {
    const int lane = threadIdx.x % 32;
    const int64_t place = row.place(params);
    const float own = params.own_lse[place];
    const float sink = params.sinks ? params.sinks[row.head] : -infinity();
    float most = own;
    for_lane(found, [&](float lse) { most = fmaxf(most, lse); });
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    // Weights are relative to the largest logit, which may be the sink's; an infinite sink leaves
    // no weight for keys.
    const bool nothing = most == -infinity() || sink == infinity();
    const float base = nothing ? 0.0f : fmaxf(most, sink);
    const float sink_weight = nothing ? 0.0f : __expf(sink - base);
    const float own_weight = __expf(own - base);
    float parts_weight = 0;
    float parts_sum = 0;  // relative to the largest key; the sink may be far above it
    for_lane(found, [&](float lse) {
      parts_weight += __expf(lse - base);
      parts_sum += __expf(lse - most);
    });
    parts_weight = warp_sum(parts_weight);
    parts_sum = warp_sum(parts_sum) + __expf(own - most);
    if (params.lse && lane == 0)
      params.lse[place] = most == -infinity() ? most : most + logf(parts_sum);
    const float factor = nothing ? 0.0f : 1.0f / (own_weight + parts_weight + sink_weight);
    // The last pass has divided by the sum of its weight and the sink's.
    const float own_factor = (own_weight + sink_weight) * factor;
    auto* out = static_cast<uint16_t*>(params.out) + row.token * params.out_token_stride +
                row.head * params.out_head_stride;
#pragma unroll 1
    for (int column = 4 * lane; column < params.head_dim_v; column += 128) {
      auto* values = reinterpret_cast<uint2*>(out + column);
      const uint2 whole = *values;
      const float2 low = unpack<kOut>(whole.x), high = unpack<kOut>(whole.y);
      float4 sum = {low.x * own_factor, low.y * own_factor, high.x * own_factor,
                    high.y * own_factor};
#pragma unroll 1
      for (int level = 0; level < found.count; ++level) {
        const States states = found.levels[level];
#pragma unroll 4
        for (int part = 0; part < states.count; ++part) {
          const int64_t at = states.at(part);
          const float weight = __expf(states.lse[at] - base) * factor;
          const float4 state =
              *reinterpret_cast<const float4*>(states.out + at * params.head_dim_v + column);
          if (weight == 0) continue;  // its out may be unwritten
          sum.x += state.x * weight;
          sum.y += state.y * weight;
          sum.z += state.z * weight;
          sum.w += state.w * weight;
        }
      }
      *values = nothing ? uint2{} : uint2{pack<kOut>(sum.x, sum.y), pack<kOut>(sum.z, sum.w)};
    }
  }

  __device__ static void run(const Params& params) {
    const int request = blockIdx.x;
    if (!params.plan_complete) wait_for_previous_kernel();
    const int end = __ldcg(params.first_keys + request);
    const RequestView view = request_view(params.batch, request);
    const int heads = params.batch.q_heads;
    int number = static_cast<int>(blockIdx.y * kJoinWarps + threadIdx.x / 32);
    const auto row_of = [&](int i) { return Row{request, view.q_begin + i / heads, i % heads}; };
    const int rows = end > 0 ? view.q_len * heads : 0;
    __shared__ Found all_found[kJoinWarps];
    Found& found = all_found[threadIdx.x / 32];
    if (number < rows) find_all(params, row_of(number), end, found);
    wait_and_allow_next();
#pragma unroll 1
    while (number < rows) {
      join_row(params, found, row_of(number));
      number += static_cast<int>(gridDim.y) * kJoinWarps;
      __syncwarp();  // all lanes have read `found`
      if (number < rows) find_all(params, row_of(number), end, found);
    }
  }
};

template <Type kOut>
using Config = PrefixJoinConfig<kOut>;

}  // namespace fovea::kernels::cuda
