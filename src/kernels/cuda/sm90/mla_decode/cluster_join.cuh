// SPDX-License-Identifier: Apache-2.0
// Parts of a row tile that blocks of a cluster computed, joined in their shared memory: each block
// gets its share of the tile's rows from all of them and writes what they add up to. Where a tile
// has parts in several clusters their sums go to memory, and the block that stores the last one of
// a row adds up the row. The order of the sums does not depend on who that is.
#pragma once

#include "kernels/cuda/common/counters.cuh"
#include "kernels/cuda/sm90/mla_decode/epilogue.cuh"
#include "kernels/cuda/sm90/mla_decode/mainloop.cuh"

namespace fovea::kernels::cuda {

// The blocks of this cluster that have parts of a row tile.
struct PartGroup {
  int first;        // worker that has the tile's first part
  int shift;        // log2 of the blocks of a cluster
  int segments;     // clusters that have parts
  int begin, size;  // first worker of the group, and how many: a power of two
  int log_size;
  int own;    // number of this block in it
  int share;  // rows of the tile that a block joins
  int rows;   // this one's: share, or less

  __device__ __forceinline__ PartGroup(const MlaWorkList& work, const RowTile& tile) {
    first = first_of_parts(tile.item.partial);
    const int end = first + count_of_parts(tile.item.partial);
    const int worker = static_cast<int>(blockIdx.x);
    shift = 31 - __clz(work.cluster);
    const int base = worker >> shift << shift;
    segments = ((end - 1) >> shift) - (first >> shift) + 1;
    begin = max(first, base);
    size = min(end, base + work.cluster) - begin;
    own = worker - begin;
    log_size = 31 - __clz(size);
    share = (tile.rows + size - 1) >> log_size;
    rows = rows_of(tile, own);
  }
  __device__ __forceinline__ int rows_of(const RowTile& tile, int member) const {
    return max(min(tile.rows - member * share, share), 0);
  }
  // First worker of a segment: the place of its sums in memory.
  __device__ __forceinline__ int segment_begin(int segment) const {
    return segment == 0 ? first : ((first >> shift) + segment) << shift;
  }
};

// Of one row and member, whose number is lane / 2: rows one after the other. The same in all warps.
struct PartWeight {
  float weight;       // of the part's values
  float most, total;  // of the row: all parts' weights relative to 2^most

  template <class C>
  __device__ __forceinline__ static PartWeight find(const typename C::SharedMemory& shared,
                                                    const PartGroup& group) {
    const int lane = threadIdx.x % 32;
    const int member = lane / 2 & (group.size - 1);
    const int row = min(lane / 2 >> group.log_size, group.rows - 1);
    const auto& from = shared.cluster.joined[member * group.rows + row];
    const float4 sums = *reinterpret_cast<const float4*>(&from.sums[lane % 2 * 4]);
    PartWeight own;
    own.most = from.most;
#pragma unroll
    for (int step = 1; step < kMlaMaxCluster; step *= 2) {
      const float other = __shfl_xor_sync(~0u, own.most, 2 * step);
      own.most = step < group.size ? fmaxf(own.most, other) : own.most;
    }
    own.weight = exp2_fast(from.most - own.most);
    own.total = own.weight * (sums.x + sums.y + sums.z + sums.w);
    own.total += __shfl_xor_sync(~0u, own.total, 1);
#pragma unroll
    for (int step = 1; step < kMlaMaxCluster; step *= 2) {
      const float other = __shfl_xor_sync(~0u, own.total, 2 * step);
      own.total += step < group.size ? other : 0;
    }
    return own;
  }
};

__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& values) {
  sum.x = fmaf(factor, values.x, sum.x);
  sum.y = fmaf(factor, values.y, sum.y);
  sum.z = fmaf(factor, values.z, sum.z);
  sum.w = fmaf(factor, values.w, sum.w);
}

// Columns column to column + 3 of row `row` of this block's share, over the group. A warp has one
// row.
template <class C>
__device__ __forceinline__ float4 sum_group(const typename C::SharedMemory& shared,
                                            const PartGroup& group, const PartWeight& weights,
                                            int row, int column) {
  constexpr int kAtOnce = 8;
  const auto* from = &shared.cluster.joined[row];
  float4 all = {0, 0, 0, 0};
#pragma unroll 1
  for (int first = 0; first < group.size; first += kAtOnce) {
    uint2 values[kAtOnce];
    float factor[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float weight =
          __shfl_sync(~0u, weights.weight, 2 * ((row << group.log_size) + first + i));
      factor[i] = 0;
      values[i] = {0, 0};
      if (first + i < group.size) {
        factor[i] = weight * from->units[column / C::kWarpColumns];
        values[i] = *reinterpret_cast<const uint2*>(&from->values[column]);
      }
      from += group.rows;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint2 v = values[i];
      add_scaled(all, factor[i],
                 {to_float<f16>(static_cast<uint16_t>(v.x)),
                  to_float<f16>(static_cast<uint16_t>(v.x >> 16)),
                  to_float<f16>(static_cast<uint16_t>(v.y)),
                  to_float<f16>(static_cast<uint16_t>(v.y >> 16))});
    }
  }
  return all;
}

// Where a row of the tile goes.
struct JoinedPlace {
  int64_t out, lse;

  __device__ __forceinline__ JoinedPlace(const MlaDecodeParams& params, const RowTile& tile,
                                         int row) {
    const int packed = tile.first_row + row;
    const int64_t token = tile.view.q_begin + packed / params.q_heads;
    const int head = packed % params.q_heads;
    out = token * params.out_token_stride + head * params.out_head_stride;
    lse = token * params.q_heads + head;
  }
  // Columns column to column + 3; lse in powers of two.
  template <class C>
  __device__ __forceinline__ void store(const MlaDecodeParams& params, int column, const float4& v,
                                        float value) const {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out) + out + column) = {
        pack<C::kQ>(v.x, v.y), pack<C::kQ>(v.z, v.w)};
    if (params.lse && column == 0) params.lse[lse] = value * kLn2;
  }
};

// Counts this block's rows as stored; last: those that all clusters have stored now.
template <class C>
__device__ __forceinline__ void take_tickets(const MlaWorkList& work, const PartGroup& group,
                                             int thread, typename C::SharedMemory& shared) {
  named_barrier_wait(kConsumersBarrier, kConsumerThreads);
  if (thread < group.rows) {
    const uint32_t before = increment_acquire_release(
        work.arrivals + group.first * C::kRows + group.own * group.share + thread,
        group.segments - 1);
    shared.cluster.last[thread] = before == static_cast<uint32_t>(group.segments - 1);
  }
  named_barrier_wait(kConsumersBarrier, kConsumerThreads);
}

// Stores columns column to column + 3 of a row that has parts in several clusters, from memory.
template <class C>
__device__ __forceinline__ void store_segments(const MlaDecodeParams& params, const JoinedPlace& to,
                                               const PartGroup& group, int row, int column) {
  constexpr int kAtOnce = 8;
  const MlaWorkList& work = params.work;
  float most = -infinity();
  float total = 0;
  float4 sum = {0, 0, 0, 0};
#pragma unroll 1
  for (int first = 0; first < group.segments; first += kAtOnce) {
    float lse[kAtOnce];
    float4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      lse[i] = -infinity();
      values[i] = {0, 0, 0, 0};
      if (first + i >= group.segments) continue;
      const int64_t place = int64_t{group.segment_begin(first + i)} * C::kRows + row;
      lse[i] = __ldcg(work.partial_lse + place);
      values[i] = __ldcg(reinterpret_cast<const float4*>(
          static_cast<const float*>(work.partial_out) + place * C::kRank + column));
    }
    float next = most;
#pragma unroll
    for (const float one : lse) next = fmaxf(next, one);
    if (next == -infinity()) continue;
    const float rescale = exp2_fast(most - next);
    most = next;
    total *= rescale;
    sum = {sum.x * rescale, sum.y * rescale, sum.z * rescale, sum.w * rescale};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float weight = exp2_fast(lse[i] - most);
      total += weight;
      add_scaled(sum, weight, values[i]);
    }
  }
  const float inverse = total > 0 ? __fdividef(1.0f, total) : 0;
  to.store<C>(params, column, {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse},
              total > 0 ? most + log2f(total) : -infinity());
}

// After the blocks of the group have put down their parts in ClusterMemory, each behind a fence of
// the async proxy. 256 threads, which meet here and have arrived at the cluster's barrier when the
// block began; at its next phase they arrive here.
template <class C>
__device__ __forceinline__ void join_in_cluster(const MlaDecodeParams& params, const RowTile& tile,
                                                const PartGroup& group,
                                                typename C::SharedMemory& shared) {
  constexpr int kRowBytes = sizeof(typename C::PartRow);
  constexpr int kRowThreads = C::kRank / 4;
  constexpr int kRowsAtOnce = kConsumerThreads / kRowThreads;
  const MlaWorkList& work = params.work;
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroupThreads;
  if (thread == 0) {
    shared.cluster.parts_full.arrive_expecting((group.size - 1) * group.rows * kRowBytes);
  }
  named_barrier_wait(kConsumersBarrier, kConsumerThreads);
  cluster_wait();
  // A copy takes a thread 80 cycles, so all warps send. Each block begins with the next: none is
  // the last one for all.
  for (int i = 1 + thread / 32; i < group.size && thread % 32 == 0; i += C::kConsumerWarps) {
    int to = group.own + i;
    if (to >= group.size) to -= group.size;
    const int rows = group.rows_of(tile, to);
    const auto rank = static_cast<uint32_t>(group.begin + to) & (work.cluster - 1);
    if (rows > 0) {
      copy_in_cluster(&shared.cluster.own[to * group.share],
                      &shared.cluster.joined[group.own * rows], rank, rows * kRowBytes,
                      shared.cluster.parts_full);
    }
  }
  __syncwarp();
  const int first_row = group.own * group.share;
  const int own_row = thread / kRowThreads;
  const int column = thread % kRowThreads * 4;
  JoinedPlace place(params, tile, first_row + own_row);
  shared.cluster.parts_full.wait(0);
  __syncwarp();
  cluster_arrive_relaxed();
  if (own_row < group.rows) {
    const auto weights = PartWeight::find<C>(shared, group);
#pragma unroll 1
    for (int row = own_row; row < group.rows; row += kRowsAtOnce) {
      if (row > own_row) place = JoinedPlace(params, tile, first_row + row);
      const int first = 2 * (row << group.log_size);
      const float total = __shfl_sync(~0u, weights.total, first);
      const float most = __shfl_sync(~0u, weights.most, first);
      const float inverse = total > 0 ? __fdividef(1.0f, total) : 0;
      float4 sum = sum_group<C>(shared, group, weights, row, column);
      sum = {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse};
      const float lse = total > 0 ? most + __log2f(total) : -infinity();
      if (group.segments == 1) {
        place.store<C>(params, column, sum, lse);
      } else {
        const int64_t at = int64_t{group.begin} * C::kRows + first_row + row;
        *reinterpret_cast<float4*>(static_cast<float*>(work.partial_out) + at * C::kRank + column) =
            sum;
        if (column == 0) work.partial_lse[at] = lse;
      }
    }
  }
  if (group.segments > 1) {
    take_tickets<C>(work, group, thread, shared);
#pragma unroll 1
    for (int row = own_row; row < group.rows; row += kRowsAtOnce) {
      if (!shared.cluster.last[row]) continue;
      store_segments<C>(params, JoinedPlace(params, tile, first_row + row), group, first_row + row,
                        column);
    }
  }
  __syncwarp();
  cluster_wait();
}

// Both phases of the cluster's barrier, for threads that have no part in a join; they have arrived
// at the first.
__device__ __forceinline__ void pass_cluster() {
  __syncwarp();
  cluster_wait();
  cluster_arrive_relaxed();
  cluster_wait();
}

}  // namespace fovea::kernels::cuda
