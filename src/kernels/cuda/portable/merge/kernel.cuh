// SPDX-License-Identifier: Apache-2.0
// Joins the partial results of row tiles that several CTAs shared, in ascending order of keys. CTAs
// (c, any) share the rows of merges[c]; a warp takes a row, its lanes the columns.
#pragma once

#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/common/visibility.cuh"

namespace fovea::kernels::cuda {

constexpr int kMergeWarps = 8;

template <int kRowTile, Type kOut>
struct MergeConfig {
  using Params = MergeParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kMergeWarps * 32, 0, kRowTile, kBlockKeys};

  __device__ static int64_t partial_row(const MergeItem& item, int part, int row) {
    const int slot = part == 0 ? item.first : item.first + 2 * part - 1;
    return static_cast<int64_t>(slot) * kRowTile + row;
  }

  __device__ static float warp_max(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    return value;
  }

  __device__ static void merge_row(const Params& params, const MergeItem& item,
                                   const RequestView& view, int row) {
    const int lane = threadIdx.x % 32;
    const int group = params.batch.q_heads / params.batch.kv_heads;
    const int head = item.kv_head * group + (item.first_row + row) % group;
    const int64_t token = view.q_begin + (item.first_row + row) / group;
    // A lane looks at a part.
    float most = -infinity();
    for (int part = lane; part < item.count; part += 32) {
      most = fmaxf(most, params.work.partial_lse[partial_row(item, part, row)]);
    }
    most = warp_max(most);
    float total = 0;
    for (int part = lane; part < item.count && most != -infinity(); part += 32) {
      total += __expf(params.work.partial_lse[partial_row(item, part, row)] - most);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    const bool empty = total == 0;
    const float lse = empty ? -infinity() : most + logf(total);
    if (params.lse && lane == 0) params.lse[token * params.batch.q_heads + head] = lse;
    const float base = params.sinks && !empty ? lse + log1pf(__expf(params.sinks[head] - lse)) : lse;
    const int parts = empty ? 0 : item.count;
    auto* out = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
                head * params.out_head_stride;
    for (int column = 2 * lane; column < params.head_dim_v; column += 64) {
      float low = 0;
      float high = 0;
#pragma unroll 8
      for (int part = 0; part < parts; ++part) {
        const int64_t at = partial_row(item, part, row);
        const float weight = __expf(params.work.partial_lse[at] - base);
        const float2 value =
            *reinterpret_cast<const float2*>(params.work.partial_out + at * params.head_dim_v + column);
        low += weight * value.x;
        high += weight * value.y;
      }
      if (params.f32_out) {
        const int64_t at = (token * params.batch.q_heads + head) * params.head_dim_v + column;
        *reinterpret_cast<float2*>(static_cast<float*>(params.out) + at) = {low, high};
      } else {
        *reinterpret_cast<uint32_t*>(out + column) = pack<kOut>(low, high);
      }
    }
  }

  __device__ static void run(const Params& params) {
    // The list is there: the attention ahead has waited for it before it lets this kernel start, or one before has.
    const MergeItem item = params.work.merges[blockIdx.x];
    RequestView view = {};
    if (item.count > 0) view = request_view(params.batch, item.request);
    wait_and_allow_next();
    if (item.count == 0) return;
    const int group = params.batch.q_heads / params.batch.kv_heads;
    const int rows = min(kRowTile, view.q_len * group - item.first_row);
    const int first = static_cast<int>(blockIdx.y) * kMergeWarps + static_cast<int>(threadIdx.x) / 32;
    for (int row = first; row < rows; row += static_cast<int>(gridDim.y) * kMergeWarps) {
      merge_row(params, item, view, row);
    }
  }
};

template <int kRowTile, Type kOut>
using Config = MergeConfig<kRowTile, kOut>;

}  // namespace fovea::kernels::cuda
