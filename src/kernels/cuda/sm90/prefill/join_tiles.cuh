// SPDX-License-Identifier: Apache-2.0
// The producer warp that adds up the segments of cut row tiles, where other blocks have stored some
// of them: see sm90/common/segment_sums.cuh.
#pragma once

#include "kernels/cuda/sm90/common/slots.cuh"

namespace fovea::kernels::cuda {

// Adds up a cut tile's segments. A warp calls it; each of some lanes has a row, and some of its
// columns.
template <class Config>
__device__ __forceinline__ void join_partials(const PrefillParams& params, const CutSlot& slot) {
  // As much as registers hold at once: loads one by one would take longer than the sums.
  constexpr int kLanes = Config::kAlone ? 8 : 16;  // lanes of a row
  constexpr int kAhead = Config::kAlone ? 4 : 1;   // segments loaded at a time
  constexpr int kColumns = Config::kHeadDimV / kLanes;
  const AttentionParams& attention = params.attention;
  const WorkTile& work = slot.work;
  const int rows = work.q_len << params.heads_shift;
  const int column = threadIdx.x % kLanes * kColumns;
  for (int row = threadIdx.x % 32 / kLanes; row < rows; row += 32 / kLanes) {
    RowSums sums = {kNothing, 0};
    float4 values[kColumns / 4] = {};
#pragma unroll 1
    for (int last = slot.cut.count - 1; last >= 0; last -= kAhead) {
      RowSums own_sums[kAhead];
      float4 own[kAhead][kColumns / 4];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t at = partial_row(params, slot, max(last - i, 0)) + row;
        const float2 found = __ldcg(reinterpret_cast<const float2*>(params.segments.sums + at));
        own_sums[i] = last - i < 0 ? RowSums{kNothing, 0} : RowSums{found.x, found.y};
        const auto* from =
            reinterpret_cast<const float4*>(params.segments.out + at * Config::kHeadDimV + column);
#pragma unroll
        for (int j = 0; j < kColumns / 4; ++j) own[i][j] = __ldcg(from + j);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const Join join = join_rows(sums, own_sums[i]);
#pragma unroll
        for (int j = 0; j < kColumns / 4; ++j) values[j] = join_values(join, values[j], own[i][j]);
      }
    }
    const float factor = finish_row(params, work, 0, row, sums, column == 0);
    uint16_t* to = static_cast<uint16_t*>(attention.out) +
                   (work.q_begin + row_token(params, work, 0, row)) * attention.out_token_stride +
                   row_head(params, work, row) * attention.out_head_stride + column;
#pragma unroll
    for (int j = 0; j < kColumns / 4; ++j) {
      if (column + 4 * j >= attention.head_dim_v) break;
      const uint32_t low = pack<Config::kOut>(mean(values[j].x, factor), mean(values[j].y, factor));
      const uint32_t high =
          pack<Config::kOut>(mean(values[j].z, factor), mean(values[j].w, factor));
      *reinterpret_cast<uint2*>(to + 4 * j) = {low, high};
    }
  }
}

// Adds up the cut tiles whose last missing segments this block has stored. A warp runs it.
template <class Config>
__device__ void join_tiles(const PrefillParams& params, typename Config::SharedMemory& shared) {
  const bool first_lane = threadIdx.x % 32 == 0;
  Ring<kTileSlots> slots;
  while (true) {
    shared.tile_full[slots.stage].wait(slots.phase);
    const CutSlot& slot = shared.tiles[slots.stage];
    if (slot.work.request < 0) return;
    shared.segments.stored[slots.stage].wait(slots.phase);
    if (is_cut(slot) && uniform(first_lane && last_stored(params, slot))) {
      __syncwarp();
      join_partials<Config>(params, slot);
    }
    __syncwarp();
    if (first_lane) shared.tile_empty[slots.stage].arrive();
    slots.advance();
  }
}

}  // namespace fovea::kernels::cuda
