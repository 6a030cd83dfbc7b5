// SPDX-License-Identifier: Apache-2.0
// The end of a slot: of a row tile, or of one of its key segments. Segments are added from the last to the
// first, by the block that computes all of a tile's in shared memory, or by the last of several through
// global memory: with the same operations on the same numbers, so with the same bits.
#pragma once

#include "kernels/cuda/sm90/prefill/epilogue.cuh"

namespace fovea::kernels::cuda {

// Adds an earlier segment to the sum of the later ones. A sum of nothing changes no bit of the other.
__device__ __forceinline__ Join join_rows(RowSums& later, RowSums earlier) {
  const float base = fmaxf(later.base, earlier.base);
  const Join join = {exp2_fast(later.base - base), exp2_fast(earlier.base - base)};
  later = {base, __fmaf_rn(later.total, join.later, __fmul_rn(earlier.total, join.earlier))};
  return join;
}
__device__ __forceinline__ float join_values(Join join, float later, float earlier) {
  return __fmaf_rn(later, join.later, __fmul_rn(earlier, join.earlier));
}

// Without -0, which a sum over more segments would not keep.
__device__ __forceinline__ float mean(float sum, float factor) { return __fmaf_rn(sum, factor, 0.0f); }

// Computed where it is used: what follows from it would else be kept in registers all through the key tiles.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ bool is_cut(const WorkTile& slot) { return slot.segments > 0; }

// Of the partial result of a cut tile's segment.
__device__ __forceinline__ int partial_row(const PrefillParams& params, const WorkTile& slot, int segment) {
  return slot.partial_row + segment * slot.q_len * params.attention.batch.q_heads;
}

// The slot's weights are summed: keeps what they and the segments before come to, in shared memory, as the
// registers hold the next slot's scores.
template <class Config>
__device__ __forceinline__ void add_segment_rows(const PrefillParams& params,
                                                 typename Config::SharedMemory& shared,
                                                 const WorkTile& slot, int consumer,
                                                 const Accumulators<Config>& acc) {
  const bool writes = threadIdx.x % 4 == 0;
  __syncwarp();  // behind the writes of the segment before
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread_row(half);
    RowSums sums = row_sums<Config>(acc, half);
    if (is_cut(slot)) {
      if (consumer == 0 && writes && row < slot.q_len << params.heads_shift) {
        params.order->partial_rows[partial_row(params, slot, slot.segment) + row] = sums;
      }
      continue;
    }
    SegmentRow& kept = shared.segment_rows[consumer][row];
    SegmentRow next = {sums, {}};
    if (!slot.opens) {
      next.sums = kept.sums;
      next.join = join_rows(next.sums, sums);
    }
    __syncwarp();
    if (writes) kept = next;
  }
}

template <class Config>
__device__ __forceinline__ void store_partial(const PrefillParams& params, const WorkTile& slot,
                                              const Accumulators<Config>& acc) {
  const int rows = slot.q_len << params.heads_shift;
  float* to = params.order->partial_out +
              partial_row(params, slot, slot.segment) * Config::kHeadDimV + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread_row(half);
    if (row >= rows) continue;
#pragma unroll
    for (int j = 0; j < Config::kHeadDimV / 8; ++j) {
      *reinterpret_cast<float2*>(to + row * Config::kHeadDimV + 8 * j) = {
          acc.out[4 * j + 2 * half], acc.out[4 * j + 2 * half + 1]};
    }
  }
}

// Adds up a cut tile's segments: every second row by this warp, a few columns by each lane.
template <class Config>
__device__ __forceinline__ void join_rows_of(const PrefillParams& params, const WorkTile& slot,
                                             int first_row) {
  constexpr int kColumns = Config::kHeadDimV / 32;
  const AttentionParams& attention = params.attention;
  const int lane = threadIdx.x % 32;
  const int stride = slot.q_len * attention.batch.q_heads;
  for (int row = first_row; row < slot.q_len << params.heads_shift; row += kJoiningWarps) {
    const int last = partial_row(params, slot, slot.segments - 1) + row;
    const RowSums* from_rows = params.order->partial_rows + last;
    const float* from = params.order->partial_out + static_cast<int64_t>(last) * Config::kHeadDimV + lane * kColumns;
    RowSums sums{};
    float values[kColumns] = {};
#pragma unroll 1
    for (int segment = slot.segments; segment > 0; --segment) {
      const float2 own_row = __ldcg(reinterpret_cast<const float2*>(from_rows));
      float2 own[kColumns / 2];
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) own[i] = __ldcg(reinterpret_cast<const float2*>(from) + i);
      const bool first = segment == slot.segments;
      const RowSums own_sums = {own_row.x, own_row.y};
      const Join join = first ? Join{0, 1} : join_rows(sums, own_sums);
      if (first) sums = own_sums;
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        values[2 * i] = join_values(join, values[2 * i], own[i].x);
        values[2 * i + 1] = join_values(join, values[2 * i + 1], own[i].y);
      }
      from_rows -= stride;
      from -= static_cast<int64_t>(stride) * Config::kHeadDimV;
    }
    const float factor = finish_row(params, slot, 0, row, sums, 1, lane == 0);
    const int column = lane * kColumns;
    if (column >= attention.head_dim_v) continue;
    uint16_t* to = static_cast<uint16_t*>(attention.out) +
                   (slot.q_begin + row_token(params, slot, 0, row)) * attention.out_token_stride +
                   row_head(params, slot, row) * attention.out_head_stride;
    uint32_t* words = reinterpret_cast<uint32_t*>(to + column);
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) {
      words[i / 2] = pack<Config::kOut>(mean(values[i], factor), mean(values[i + 1], factor));
    }
  }
}

// The work of joining warp `warp`: of every tile whose last missing segments this block has stored, the sum.
template <class Config>
__device__ void join_tiles(const PrefillParams& params, typename Config::SharedMemory& shared, int warp) {
  const int head_blocks = params.attention.batch.q_heads >> params.heads_shift;
  Ring<kTileSlots> slots;
  while (true) {
    shared.tile_full[slots.stage].wait(slots.phase);
    const WorkTile& slot = shared.tiles[slots.stage].work;
    if (slot.request < 0) return;
    shared.tile_stored[slots.stage].wait(slots.phase);
    if (is_cut(slot) && slot.closes) {
      int32_t* stored = params.order->stored_segments +
                        (slot.request * head_blocks + (slot.q_head >> params.heads_shift)) * kJoiningWarps +
                        warp;
      int complete = 0;
      if (threadIdx.x % 32 == 0) {
        __threadfence();
        complete = atomicAdd(stored, slot.own_segments) + slot.own_segments == slot.segments;
        if (complete) *stored = 0;
        __threadfence();
      }
      if (__shfl_sync(~0u, complete, 0)) join_rows_of<Config>(params, slot, warp);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.tile_empty[slots.stage].arrive();
    slots.advance();
  }
}

// A row tile's last segment: means to shared memory, from where the copy engine takes them. out is read where it
// is and changed nowhere, else registers spill.
template <class Config, typename Value>
__device__ __forceinline__ void store_joined(const PrefillParams& params,
                                             typename Config::SharedMemory& shared,
                                             const WorkTile& slot, int consumer,
                                             const float (&factor)[2], const Value& value) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
  const bool first_thread = threadIdx.x % kWarpgroupThreads == 0;
#pragma unroll
  for (int block = 0; block < Config::kDimVBlocks; ++block) {
    uint32_t pieces[16];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 joined = value(block * 8 + j);
      pieces[2 * j] = pack<Config::kOut>(mean(joined.x, factor[0]), mean(joined.y, factor[0]));
      pieces[2 * j + 1] = pack<Config::kOut>(mean(joined.z, factor[1]), mean(joined.w, factor[1]));
    }
    if (first_thread) wait_stores_read();
    // Block n lies where sums up to those of block n / 2 lay, which all have read.
    named_barrier_wait(8 + consumer, kWarpgroupThreads);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      store_matrices(&shared.rows[consumer].out[block][row][((j + lane / 16) ^ row % 8) * 8],
                     reinterpret_cast<const uint32_t(&)[4]>(pieces[2 * j]));
    }
  }
  send_staged<Config>(params, shared, slot, consumer, 0, Config::kDimVBlocks);
}

// The slot's values have landed in acc.out: they are added to those of the tile's other segments, or stored.
template <class Config>
__device__ __forceinline__ void end_segment(const PrefillParams& params,
                                            typename Config::SharedMemory& shared,
                                            const WorkTile& slot, int consumer,
                                            const Accumulators<Config>& acc) {
  if (uniform(is_cut(slot))) {
    if (consumer == 0) store_partial<Config>(params, slot, acc);
    return;
  }
  consumer = opaque(consumer);
  const int thread = opaque(threadIdx.x % kWarpgroupThreads);
  float4(&sum)[Config::kHeadDimV / 8][kWarpgroupThreads] = shared.rows[consumer].sum;
  const bool opens = uniform(slot.opens != 0);
  __syncwarp();
  const SegmentRow& row0 = shared.segment_rows[consumer][thread_row(0)];
  const SegmentRow& row1 = shared.segment_rows[consumer][thread_row(1)];
  const Join join[2] = {opens ? Join{0, 1} : row0.join, opens ? Join{0, 1} : row1.join};
  const auto joined = [&](int j) {
    float4 later = {};
    if (!opens) later = sum[j][thread];
    return float4{join_values(join[0], later.x, acc.out[4 * j]),
                  join_values(join[0], later.y, acc.out[4 * j + 1]),
                  join_values(join[1], later.z, acc.out[4 * j + 2]),
                  join_values(join[1], later.w, acc.out[4 * j + 3])};
  };
  if (uniform(slot.closes != 0)) {
    const bool writes = threadIdx.x % 4 == 0;
    const float factor[2] = {
        finish_row(params, slot, consumer, thread_row(0), row0.sums, 1, writes),
        finish_row(params, slot, consumer, thread_row(1), row1.sums, 1, writes)};
    store_joined<Config>(params, shared, slot, consumer, factor, joined);
    return;
  }
  if (opens) {
    // The rows staged before may still be read.
    if (thread == 0) wait_stores_read();
    named_barrier_wait(8 + consumer, kWarpgroupThreads);
  }
#pragma unroll
  for (int j = 0; j < Config::kHeadDimV / 8; ++j) sum[j][thread] = joined(j);
}

}  // namespace fovea::kernels::cuda
