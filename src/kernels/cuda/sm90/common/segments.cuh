// SPDX-License-Identifier: Apache-2.0
// The end of a segment, where the keys of a row tile are summed in segments.
#pragma once

#include "kernels/cuda/sm90/common/epilogue.cuh"
#include "kernels/cuda/sm90/common/segment_sums.cuh"

namespace fovea::kernels::cuda {

// Returns the sums of a row from those of its threads.
template <class Config>
__device__ __forceinline__ RowSums row_sums(const Accumulators<Config>& acc, int half) {
  float total = acc.sum[half];
  total += __shfl_xor_sync(~0u, total, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  return {acc.base[half], total};
}

__device__ __forceinline__ const CutSlot& cut_slot(const RowTile& tile) {
  return static_cast<const CutSlot&>(*tile.slot);
}

// Makes `tile` that of the segment whose last key tile is `last`.
template <class Config>
__device__ __forceinline__ void keep_segment(RowTile& tile, int last) {
  const int begin = last / kSegmentBlocks<Config> * kSegmentBlocks<Config>;
  tile.last_block = last;
  tile.block_begin = max(tile.row_begin, begin);
  tile.ends = (tile.ends & kIsCut) | (tile.row_begin >= begin ? kCloses : 0);
}

// Makes `tile` that of the row tile's first segment.
template <class Config>
__device__ __forceinline__ void keep_first_segment(RowTile& tile) {
  tile.row_begin = tile.block_begin;
  tile.ends = uniform(!Config::kPairs && cut_slot(tile).cut.count > 0 ? kIsCut : 0);
  keep_segment<Config>(tile, uniform(tile.slot->work.block_end) - 1);
  tile.ends |= kOpens;
}

// Returns how many keys of the tile's first key tile are multiplied with values.
template <class Config>
__device__ __forceinline__ int columns_of(const RowTile& tile, int consumer) {
  if (!opens<Config>(tile)) return Config::kKeys;
  const int columns = uniform(tile.slot->rows[consumer].columns);
  return Config::kOwnEnds ? ((columns - 1) & (Config::kKeys - 1)) + 1
                          : columns;  // columns of the rows' own last key tile
}

// Returns the row of the present segment's partial result.
template <class Config>
__device__ __forceinline__ int partial_row(const PrefillParams& params, const RowTile& tile) {
  const CutSlot& slot = cut_slot(tile);
  return partial_row(params, slot, tile.last_block / kSegmentBlocks<Config> - slot.cut.first);
}

// Called when the segment's weights are summed: keeps their sums, added to those of later segments,
// in shared memory, because registers hold the next scores.
template <class Config>
__device__ __forceinline__ void add_segment_rows(const PrefillParams& params,
                                                 typename Config::SharedMemory& shared,
                                                 const RowTile& tile, int consumer,
                                                 const Accumulators<Config>& acc) {
  const CutSlot& slot = cut_slot(tile);
  const bool writes = threadIdx.x % 4 == 0;
  const int row[2] = {thread_row(0), thread_row(1)};
  SegmentRow next[2] = {{row_sums<Config>(acc, 0), kNoneLater},
                        {row_sums<Config>(acc, 1), kNoneLater}};
  if (!Config::kPairs && tile.ends & kIsCut) {
    if (consumer != 0 || !writes) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row[half] < slot.work.q_len << params.heads_shift) {
        params.segments.sums[partial_row<Config>(params, tile) + row[half]] = next[half].sums;
      }
    }
    return;
  }
  SegmentRow(&kept)[kGroupRows] = shared.segments.rows[consumer];
  __syncwarp();  // after the writes of the previous segment
  if (!opens<Config>(tile)) {
    RowSums later[2] = {kept[row[0]].sums, kept[row[1]].sums};
#pragma unroll
    for (int half = 0; half < 2; ++half) next[half].join = join_rows(later[half], next[half].sums);
    next[0].sums = later[0];
    next[1].sums = later[1];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (closes<Config>(tile)) {
      next[half].sums.total =
          finish_row(params, slot.work, consumer, row[half], next[half].sums, writes);
    }
  }
  __syncwarp();
  if (writes) {
    kept[row[0]] = next[0];
    kept[row[1]] = next[1];
  }
}

template <class Config>
__device__ __forceinline__ void store_partial(const PrefillParams& params, const RowTile& tile,
                                              const Accumulators<Config>& acc) {
  const int rows = tile.slot->work.q_len << params.heads_shift;
  float* to = params.segments.out + partial_row<Config>(params, tile) * Config::kHeadDimV +
              threadIdx.x % 4 * 2;
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

// Returns the thread's values j of the segment.
template <class Config>
__device__ __forceinline__ float4 own_values(const Accumulators<Config>& acc, int j) {
  return {acc.out[4 * j], acc.out[4 * j + 1], acc.out[4 * j + 2], acc.out[4 * j + 3]};
}
// Returns these values added to those of later segments; x and y belong to one row, z and w to
// another.
template <class Config>
__device__ __forceinline__ float4 joined(const Join (&join)[2], float4 later,
                                         const Accumulators<Config>& acc, int j) {
  return {join_values(join[0], later.x, acc.out[4 * j]),
          join_values(join[0], later.y, acc.out[4 * j + 1]),
          join_values(join[1], later.z, acc.out[4 * j + 2]),
          join_values(join[1], later.w, acc.out[4 * j + 3])};
}

// Stores the consumer's staged rows, by the copy engine if the request owns all of them.
template <class Config>
__device__ __forceinline__ void send_staged(const PrefillParams& params,
                                            typename Config::SharedMemory& shared,
                                            const WorkTile& work, int consumer) {
  const bool first_thread = threadIdx.x % kWarpgroupThreads == 0;
  const int token = row_token(params, work, consumer, 0);
  const bool whole = token + (kGroupRows >> params.heads_shift) <= work.q_len;
  fence_async_proxy();
  meet_consumer(consumer);
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

// Stages the means of a row tile's rows for the copy engine. kJoined: acc.out is added to the sum
// of later segments. acc.out is read only, because registers would spill otherwise.
template <class Config, bool kJoined>
__device__ __forceinline__ void store_means(const PrefillParams& params,
                                            typename Config::SharedMemory& shared, int consumer,
                                            const SegmentRow (&rows)[2],
                                            const Accumulators<Config>& acc) {
  consumer = opaque(consumer);
  const int thread = opaque(static_cast<int>(threadIdx.x % kWarpgroupThreads));
  const typename Config::Sum& sum = Config::sum(shared, consumer);
  const Join join[2] = {rows[0].join, rows[1].join};
  const float factor[2] = {rows[0].sums.total, rows[1].sums.total};
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane % 16;
  if (!kJoined && thread == 0) wait_stores_read();
#pragma unroll
  for (int part = 0; part < Config::kHeadDimV / 32; ++part) {
    uint32_t pieces[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = part * 4 + j;
      const float4 value = kJoined ? joined(join, sum[at][thread], acc, at) : own_values(acc, at);
      pieces[2 * j] = pack<Config::kOut>(mean(value.x, factor[0]), mean(value.y, factor[0]));
      pieces[2 * j + 1] = pack<Config::kOut>(mean(value.z, factor[1]), mean(value.w, factor[1]));
    }
    // Rows are staged in place of sums of a quarter as many columns, which all threads have read.
    if (part == 0 || (kJoined && part % 2 == 0)) meet_consumer(consumer);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      store_matrices(
          &shared.out[consumer][part / 2][row][((part % 2 * 4 + j + lane / 16) ^ row % 8) * 8],
          reinterpret_cast<const uint32_t(&)[4]>(pieces[2 * j]));
    }
  }
}

// Stores a row tile after its first segment.
template <class Config>
__device__ __forceinline__ void store_joined(const PrefillParams& params,
                                             typename Config::SharedMemory& shared,
                                             const RowTile& tile, int consumer,
                                             const Accumulators<Config>& acc) {
  const WorkTile& work = tile.slot->work;
  __syncwarp();
  const SegmentRow rows[2] = {shared.segments.rows[consumer][thread_row(0)],
                              shared.segments.rows[consumer][thread_row(1)]};
  if (opens<Config>(tile)) {
    store_means<Config, false>(params, shared, consumer, rows, acc);
  } else {
    store_means<Config, true>(params, shared, consumer, rows, acc);
  }
  send_staged<Config>(params, shared, work,
                      opaque(static_cast<int>(threadIdx.x)) / kWarpgroupThreads - 1);
}

// Adds the values in acc.out to the sum of the row tile's later segments.
template <class Config>
__device__ __forceinline__ void fold_segment(typename Config::SharedMemory& shared,
                                             const RowTile& tile, int consumer,
                                             const Accumulators<Config>& acc) {
  consumer = opaque(consumer);
  const int thread = opaque(static_cast<int>(threadIdx.x % kWarpgroupThreads));
  typename Config::Sum& sum = Config::sum(shared, consumer);
  if (opens<Config>(tile)) {
    // The rows staged before may still be being read.
    if (thread == 0) wait_stores_read();
    meet_consumer(consumer);
#pragma unroll
    for (int j = 0; j < Config::kHeadDimV / 8; ++j) sum[j][thread] = own_values(acc, j);
    return;
  }
  __syncwarp();
  const Join join[2] = {shared.segments.rows[consumer][thread_row(0)].join,
                        shared.segments.rows[consumer][thread_row(1)].join};
#pragma unroll
  for (int j = 0; j < Config::kHeadDimV / 8; ++j)
    sum[j][thread] = joined(join, sum[j][thread], acc, j);
}

// Ends a segment whose values have landed in acc.out: stores them with the sum of later segments,
// or stores them for the block that adds them up, or adds them to that sum.
template <class Config>
__device__ __forceinline__ void end_segment(const PrefillParams& params,
                                            typename Config::SharedMemory& shared,
                                            const RowTile& tile, int consumer,
                                            const Accumulators<Config>& acc) {
  if (!Config::kPairs && tile.ends & kIsCut) {
    if (consumer == 0) store_partial<Config>(params, tile, acc);
  } else if (closes<Config>(tile)) {
    store_joined<Config>(params, shared, tile, consumer, acc);
  } else {
    fold_segment<Config>(shared, tile, consumer, acc);
  }
}

}  // namespace fovea::kernels::cuda
