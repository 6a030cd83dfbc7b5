// SPDX-License-Identifier: Apache-2.0
// The end of a slot where segments are summed: one segment of keys of a row tile. They are added from the last to
// the first, by the block that computes all of a tile's in shared memory, or by the last of several through global
// memory: with the same operations on the same numbers, so with the same bits.
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
__device__ __forceinline__ float4 join_values(Join join, float4 later, float4 earlier) {
  return {join_values(join, later.x, earlier.x), join_values(join, later.y, earlier.y),
          join_values(join, later.z, earlier.z), join_values(join, later.w, earlier.w)};
}
// What the last segment is to be joined with.
constexpr Join kNoneLater = {0, 1};

// Without -0, which a sum over more segments would not keep.
__device__ __forceinline__ float mean(float sum, float factor) { return __fmaf_rn(sum, factor, 0.0f); }

// Sums of a row of the thread, from those of its columns.
template <class Config>
__device__ __forceinline__ RowSums row_sums(const Accumulators<Config>& acc, int half) {
  float total = acc.sum[half];
  total += __shfl_xor_sync(~0u, total, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  return {acc.base[half], total};
}

// As finish_rows, of one row. The thread of the row that `writes` stores lse.
__device__ __forceinline__ float finish_row(const PrefillParams& params, const WorkTile& work,
                                            int consumer, int row, RowSums sums, bool writes) {
  const AttentionParams& attention = params.attention;
  const bool empty = sums.total == 0;
  const float factor = empty ? 0.0f : __fdividef(1.0f, sums.total);
  if (!attention.lse && !attention.sinks) return factor;
  const float lse = empty ? -infinity() : (sums.base + log2f(sums.total)) * kLn2;
  const int head = row_head(params, work, row);
  const int token = row_token(params, work, consumer, row);
  if (token >= work.q_len) return factor;
  if (attention.lse && writes) {
    attention.lse[static_cast<int64_t>(work.q_begin + token) * attention.batch.q_heads + head] = lse;
  }
  return attention.sinks && !empty ? factor / (1.0f + __expf(attention.sinks[head] - lse)) : factor;
}

// Computed where it is used: what follows from it would else be kept in registers all through the key tiles.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Makes the tile that of its segment whose last key tile is `last`.
template <class Config>
__device__ __forceinline__ void keep_segment(RowTile& tile, int last) {
  tile.last_block = last;
  tile.block_begin =
      max(uniform(tile.slot->work.block_begin), last / Config::kSegmentBlocks * Config::kSegmentBlocks);
}

// Whether these are the first and the last key tiles that the block takes of the row tile.
template <class Config>
__device__ __forceinline__ bool opens(const RowTile& tile) {
  return uniform(tile.slot->work.block_end - 1 == tile.last_block);
}
template <class Config>
__device__ __forceinline__ bool closes(const RowTile& tile) {
  return !Config::kSegments || uniform(tile.slot->work.block_begin == tile.block_begin);
}

// Of the tile's first key tile, which are multiplied with values.
template <class Config>
__device__ __forceinline__ int columns_of(const RowTile& tile, int consumer) {
  const int columns = tile.slot->rows[consumer].columns;
  return uniform(Config::kSegments && tile.last_block < tile.slot->work.block_end - 1 ? Config::kKeys : columns);
}

__device__ __forceinline__ const CutSlot& cut_slot(const RowTile& tile) {
  return static_cast<const CutSlot&>(*tile.slot);
}
__device__ __forceinline__ bool is_cut(const CutSlot& slot) { return slot.cut.count > 0; }

// Where the partial result of a cut tile's segment begins, counted from the tile's first.
__device__ __forceinline__ int partial_row(const PrefillParams& params, const CutSlot& slot, int segment) {
  return slot.cut.partial_row + segment * slot.work.q_len * params.attention.batch.q_heads;
}
// Of the segment at hand.
template <class Config>
__device__ __forceinline__ int partial_row(const PrefillParams& params, const RowTile& tile) {
  const CutSlot& slot = cut_slot(tile);
  return partial_row(params, slot, tile.last_block / Config::kSegmentBlocks - slot.cut.first);
}

// The segment's weights are summed: keeps what they and the later segments' come to in shared memory, as the
// registers hold the next scores.
template <class Config>
__device__ __forceinline__ void add_segment_rows(const PrefillParams& params,
                                                 typename Config::SharedMemory& shared,
                                                 const RowTile& tile, int consumer,
                                                 const Accumulators<Config>& acc) {
  const CutSlot& slot = cut_slot(tile);
  const bool first = opens<Config>(tile);
  const bool writes = threadIdx.x % 4 == 0;
  __syncwarp();  // behind the writes of the segment before
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread_row(half);
    const RowSums sums = row_sums<Config>(acc, half);
    if (is_cut(slot)) {
      if (consumer == 0 && writes && row < slot.work.q_len << params.heads_shift) {
        params.segments.sums[partial_row<Config>(params, tile) + row] = sums;
      }
      continue;
    }
    SegmentRow& kept = shared.segments.rows[consumer][row];
    SegmentRow next = {sums, kNoneLater};
    if (!first) {
      next.sums = kept.sums;
      next.join = join_rows(next.sums, sums);
    }
    __syncwarp();
    if (writes) kept = next;
  }
}

template <class Config>
__device__ __forceinline__ void store_partial(const PrefillParams& params, const RowTile& tile,
                                              const Accumulators<Config>& acc) {
  const int rows = tile.slot->work.q_len << params.heads_shift;
  float* to = params.segments.out + partial_row<Config>(params, tile) * Config::kHeadDimV + threadIdx.x % 4 * 2;
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

// Adds up a cut tile's segments. A warp, of which some lanes have a row, each of them some columns.
template <class Config>
__device__ __forceinline__ void join_partials(const PrefillParams& params, const CutSlot& slot) {
  // What registers hold: all of a group of 4 by 4 segments at once, whose loads take 0.7 us one by one.
  constexpr int kLanes = Config::kAlone ? 8 : 16;  // of a row
  constexpr int kAhead = Config::kAlone ? 4 : 1;   // segments on their way
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
        const auto* from = reinterpret_cast<const float4*>(params.segments.out + at * Config::kHeadDimV + column);
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
      const uint32_t high = pack<Config::kOut>(mean(values[j].z, factor), mean(values[j].w, factor));
      *reinterpret_cast<uint2*>(to + 4 * j) = {low, high};
    }
  }
}

// Whether these were the last missing segments of the row tile, all of whose partial results may be read then. One
// thread, behind the block's stores.
__device__ __forceinline__ bool last_stored(const PrefillParams& params, const CutSlot& slot) {
  const int head_blocks = params.attention.batch.q_heads >> params.heads_shift;
  int32_t* stored = params.segments.stored + slot.work.request * head_blocks +
                    (slot.work.q_head >> params.heads_shift);
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(stored), "r"(slot.cut.own)
               : "memory");
  const bool last = before + slot.cut.own == slot.cut.count;
  if (last) *stored = 0;
  return last;
}

// The joining warp: sums of the cut tiles whose last missing segments this block has stored.
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

// What is left in acc.out for fold_segment: a row tile's last segment, or an earlier one.
enum class Left : int { nothing, last, earlier };

// The thread's values j of the segment.
template <class Config>
__device__ __forceinline__ float4 own_values(const Accumulators<Config>& acc, int j) {
  return {acc.out[4 * j], acc.out[4 * j + 1], acc.out[4 * j + 2], acc.out[4 * j + 3]};
}
// Added to those of the later ones; x and y are of one row, z and w of another.
template <class Config>
__device__ __forceinline__ float4 joined(const Join (&join)[2], float4 later, const Accumulators<Config>& acc,
                                         int j) {
  return {join_values(join[0], later.x, acc.out[4 * j]), join_values(join[0], later.y, acc.out[4 * j + 1]),
          join_values(join[1], later.z, acc.out[4 * j + 2]), join_values(join[1], later.w, acc.out[4 * j + 3])};
}

// The consumer's staged rows to memory: by the copy engine where all are the request's.
template <class Config>
__device__ __forceinline__ void send_staged(const PrefillParams& params,
                                            typename Config::SharedMemory& shared, const WorkTile& work,
                                            int consumer) {
  const bool first_thread = threadIdx.x % kWarpgroupThreads == 0;
  const int token = row_token(params, work, consumer, 0);
  const bool whole = token + (kGroupRows >> params.heads_shift) <= work.q_len;
  fence_async_proxy();
  named_barrier_wait(8 + consumer, kWarpgroupThreads);
#pragma unroll
  for (int block = 0; block < Config::kDimVBlocks; ++block) {
    if (!whole) {
      copy_staged<Config>(params, shared, work, consumer, block);
    } else if (first_thread) {
      store_box(params.out, shared.out[consumer][block], block * kSwizzledColumns, work.q_head,
                work.q_begin + token);
    }
  }
  if (first_thread) commit_stores();
}

// Behind a row tile's first segment: means to shared memory, from where the copy engine takes them. out is read
// where it is and changed nowhere, else registers spill.
template <class Config>
__device__ __forceinline__ void store_joined(const PrefillParams& params,
                                             typename Config::SharedMemory& shared,
                                             const RowTile& tile, int consumer,
                                             const Accumulators<Config>& acc) {
  consumer = opaque(consumer);
  const int thread = opaque(threadIdx.x % kWarpgroupThreads);
  const WorkTile& work = tile.slot->work;
  const bool none_later = opens<Config>(tile);
  const typename Config::Sum& sum = Config::sum(shared, consumer);
  __syncwarp();
  const SegmentRow rows[2] = {shared.segments.rows[consumer][thread_row(0)],
                              shared.segments.rows[consumer][thread_row(1)]};
  const Join join[2] = {rows[0].join, rows[1].join};
  const bool writes = threadIdx.x % 4 == 0;
  const float factor[2] = {
      finish_row(params, work, consumer, thread_row(0), rows[0].sums, writes),
      finish_row(params, work, consumer, thread_row(1), rows[1].sums, writes)};
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int block = 0; block < Config::kDimVBlocks; ++block) {
    uint32_t pieces[16];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 value = joined(join, none_later ? float4{} : sum[block * 8 + j][thread], acc, block * 8 + j);
      pieces[2 * j] = pack<Config::kOut>(mean(value.x, factor[0]), mean(value.y, factor[0]));
      pieces[2 * j + 1] = pack<Config::kOut>(mean(value.z, factor[1]), mean(value.w, factor[1]));
    }
    if (thread == 0) wait_stores_read();
    // Block n lies where sums up to those of block n / 2 lay, which all have read.
    named_barrier_wait(8 + consumer, kWarpgroupThreads);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      store_matrices(&shared.out[consumer][block][row][((j + lane / 16) ^ row % 8) * 8],
                     reinterpret_cast<const uint32_t(&)[4]>(pieces[2 * j]));
    }
  }
  send_staged<Config>(params, shared, work, consumer);
}

// Adds the values in acc.out to the sum of the row tile's later segments. Called while the next scores are
// multiplied, before acc.out is written again.
template <class Config>
__device__ __forceinline__ void fold_segment(typename Config::SharedMemory& shared, int consumer, Left left,
                                             const Accumulators<Config>& acc) {
  consumer = opaque(consumer);
  const int thread = opaque(threadIdx.x % kWarpgroupThreads);
  typename Config::Sum& sum = Config::sum(shared, consumer);
  if (uniform(left == Left::last)) {
    // The rows staged before may still be read.
    if (thread == 0) wait_stores_read();
    named_barrier_wait(8 + consumer, kWarpgroupThreads);
#pragma unroll
    for (int j = 0; j < Config::kHeadDimV / 8; ++j) sum[j][thread] = own_values(acc, j);
    return;
  }
  __syncwarp();
  const Join join[2] = {shared.segments.rows[consumer][thread_row(0)].join,
                        shared.segments.rows[consumer][thread_row(1)].join};
#pragma unroll
  for (int j = 0; j < Config::kHeadDimV / 8; ++j) sum[j][thread] = joined(join, sum[j][thread], acc, j);
}

// The segment's values have landed in acc.out: they are stored with the sum of the row tile's later segments, stored
// for whoever adds them up, or left to fold_segment.
template <class Config>
__device__ __forceinline__ Left end_segment(const PrefillParams& params,
                                            typename Config::SharedMemory& shared,
                                            const RowTile& tile, int consumer,
                                            const Accumulators<Config>& acc) {
  if (uniform(is_cut(cut_slot(tile)))) {
    if (consumer == 0) store_partial<Config>(params, tile, acc);
    return Left::nothing;
  }
  if (closes<Config>(tile)) {
    store_joined<Config>(params, shared, tile, consumer, acc);
    return Left::nothing;
  }
  return opens<Config>(tile) ? Left::last : Left::earlier;
}

}  // namespace fovea::kernels::cuda
