// SPDX-License-Identifier: Apache-2.0
// Joins the parts of a row tile that blocks of a cluster computed, in their shared memory: each
// block receives its share of the tile's rows from all of them, and stores their sums. If a tile
// has parts in several clusters, their sums go to global memory, and the block that stores the last
// one of a row adds up the row. The order of the sums does not depend on which block that is.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/counters.cuh"
#include "kernels/cuda/common/log2.cuh"
#include "kernels/cuda/sm90/mla_decode_16/config.cuh"

namespace fovea::kernels::cuda {

// The blocks of this cluster that have parts of a row tile.
struct PartGroup {
  int first;        // worker that has the tile's first part
  int shift;        // log2 of the blocks of a cluster
  int segments;     // clusters that have parts
  int begin, size;  // first worker of the group, and their number, a power of two
  int log_size;
  int own;    // number of this block in the group
  int share;  // rows of the tile that a block joins
  int rows;   // rows that this block joins: share, or less

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
  // The first worker of a segment, where its sums are stored.
  __device__ __forceinline__ int segment_begin(int segment) const {
    return segment == 0 ? first : ((first >> shift) + segment) << shift;
  }
};

// Weight of the part of one row and member, which are numbered by lane / 2, row after row. The same
// in all warps.
struct PartWeight {
  float weight;      // weight of the part's values
  float max, total;  // the row's maximum and its weights of all parts relative to 2^max

  template <class C>
  __device__ __forceinline__ static PartWeight find(const typename C::SharedMemory& shared,
                                                    const PartGroup& group) {
    const int lane = threadIdx.x % 32;
    const int member = lane / 2 & (group.size - 1);
    const int row = min(lane / 2 >> group.log_size, group.rows - 1);
    const auto& from = shared.cluster.joined[member * group.rows + row];
    const float4 sums = *reinterpret_cast<const float4*>(&from.sums[lane % 2 * 4]);
    PartWeight own;
    own.max = from.max;
#pragma unroll
    for (int step = 1; step < kMlaMaxCluster; step *= 2) {
      const float other = __shfl_xor_sync(~0u, own.max, 2 * step);
      own.max = step < group.size ? fmaxf(own.max, other) : own.max;
    }
    own.weight = exp2_fast(from.max - own.max);
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

// Offsets of a row of the tile in the output.
struct JoinedPlace {
  int64_t out, lse;

  __device__ __forceinline__ JoinedPlace(const MlaDecodeParams& params, const RowTile& tile,
                                         int row) {
    const int packed = tile.first_row + row;
    const int64_t token = tile.view.q_begin + packed / params.q_heads;
    const int head = packed % params.q_heads;
    out = token * params.out.token_stride + head * params.out.head_stride;
    lse = token * params.q_heads + head;
  }
  // Stores columns column to column + 3, and with the first ones the LSE, given in powers of two.
  template <class C>
  __device__ __forceinline__ void store(const MlaDecodeParams& params, int column, const float4& v,
                                        float value) const {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out.data) + out + column) = {
        pack<C::kQ>(v.x, v.y), pack<C::kQ>(v.z, v.w)};
    if (params.out.lse && column == 0) params.out.lse[lse] = value * kLn2;
  }
};

// All consumer threads, after the blocks of the group have written their parts to ClusterMemory and
// fenced the async proxy. They have arrived at the cluster's barrier when the block began, and
// arrive at its next phase here.
template <class C>
class ClusterJoin {
 public:
  __device__ __forceinline__ ClusterJoin(const MlaDecodeParams& params,
                                         typename C::SharedMemory& shared, const RowTile& tile,
                                         const PartGroup& group)
      : params_(params), shared_(shared), tile_(tile), group_(group) {}

  __device__ __forceinline__ void run() {
    const MlaWorkList& work = params_.work;
    const int thread = consumer_thread();
    if (thread == 0) {
      shared_.cluster.parts_full.arrive_expecting((group_.size - 1) * group_.rows * kRowBytes);
    }
    sync_consumers();
    cluster_wait();
    send_rows();
    const int first_row = group_.own * group_.share;
    const int own_row = thread / kRowThreads;
    const int column = thread % kRowThreads * 4;
    JoinedPlace place(params_, tile_, first_row + own_row);
    shared_.cluster.parts_full.wait(0);
    __syncwarp();
    cluster_arrive_relaxed();
    if (own_row < group_.rows) {
      const auto weights = PartWeight::find<C>(shared_, group_);
#pragma unroll 1
      for (int row = own_row; row < group_.rows; row += kRowsAtOnce) {
        if (row > own_row) place = JoinedPlace(params_, tile_, first_row + row);
        const int first = 2 * (row << group_.log_size);
        const float total = __shfl_sync(~0u, weights.total, first);
        const float max = __shfl_sync(~0u, weights.max, first);
        const float inverse = total > 0 ? __fdividef(1.0f, total) : 0;
        float4 sum = sum_group(weights, row, column);
        sum = {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse};
        const float lse = total > 0 ? max + __log2f(total) : -infinity();
        if (group_.segments == 1) {
          place.store<C>(params_, column, sum, lse);
        } else {
          const int64_t at = int64_t{group_.begin} * C::kRows + first_row + row;
          *reinterpret_cast<float4*>(static_cast<float*>(work.partial_out) + at * C::kRank +
                                     column) = sum;
          if (column == 0) work.partial_lse[at] = lse;
        }
      }
    }
    if (group_.segments > 1) {
      count_rows(thread);
#pragma unroll 1
      for (int row = own_row; row < group_.rows; row += kRowsAtOnce) {
        if (!shared_.cluster.last[row]) continue;
        store_segments(JoinedPlace(params_, tile_, first_row + row), first_row + row, column);
      }
    }
    __syncwarp();
    cluster_wait();
  }

 private:
  static constexpr int kRowBytes = sizeof(typename C::PartRow);
  static constexpr int kRowThreads = C::kRank / 4;
  static constexpr int kRowsAtOnce = kConsumerThreads / kRowThreads;
  static constexpr int kPartsAtOnce = 8;

  // Sends each other block the rows that it joins. All warps send, since a copy occupies its thread
  // for some time. Each block begins with the next one, so that no block is the last for all.
  __device__ __forceinline__ void send_rows() {
    const int thread = consumer_thread();
    for (int i = 1 + thread / 32; i < group_.size && thread % 32 == 0; i += kConsumerWarps) {
      int to = group_.own + i;
      if (to >= group_.size) to -= group_.size;
      const int rows = group_.rows_of(tile_, to);
      const auto rank = static_cast<uint32_t>(group_.begin + to) & (params_.work.cluster - 1);
      if (rows > 0) {
        copy_in_cluster(&shared_.cluster.own[to * group_.share],
                        &shared_.cluster.joined[group_.own * rows], rank, rows * kRowBytes,
                        shared_.cluster.parts_full);
      }
    }
    __syncwarp();
  }

  // Returns columns column to column + 3 of row `row` of this block's share, summed over the group.
  // A warp has one row.
  __device__ __forceinline__ float4 sum_group(const PartWeight& weights, int row,
                                              int column) const {
    const auto* from = &shared_.cluster.joined[row];
    float4 all = {0, 0, 0, 0};
#pragma unroll 1
    for (int first = 0; first < group_.size; first += kPartsAtOnce) {
      uint2 values[kPartsAtOnce];
      float factor[kPartsAtOnce];
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const float weight =
            __shfl_sync(~0u, weights.weight, 2 * ((row << group_.log_size) + first + i));
        factor[i] = 0;
        values[i] = {0, 0};
        if (first + i < group_.size) {
          factor[i] = weight * from->units[column / C::kWarpColumns];
          values[i] = *reinterpret_cast<const uint2*>(&from->values[column]);
        }
        from += group_.rows;
      }
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
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

  // Counts this block's rows as stored. Marks the rows that all clusters have stored now.
  __device__ __forceinline__ void count_rows(int thread) {
    sync_consumers();
    if (thread < group_.rows) {
      const uint32_t before = increment_acquire_release(
          params_.work.arrivals + group_.first * C::kRows + group_.own * group_.share + thread,
          group_.segments - 1);
      shared_.cluster.last[thread] = before == static_cast<uint32_t>(group_.segments - 1);
    }
    sync_consumers();
  }

  // Joins columns column to column + 3 of a row that has parts in several clusters, from memory.
  __device__ __forceinline__ void store_segments(const JoinedPlace& to, int row, int column) const {
    const MlaWorkList& work = params_.work;
    float max = -infinity();
    float total = 0;
    float4 sum = {0, 0, 0, 0};
#pragma unroll 1
    for (int first = 0; first < group_.segments; first += kPartsAtOnce) {
      float lse[kPartsAtOnce];
      float4 values[kPartsAtOnce];
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        lse[i] = -infinity();
        values[i] = {0, 0, 0, 0};
        if (first + i >= group_.segments) continue;
        const int64_t place = int64_t{group_.segment_begin(first + i)} * C::kRows + row;
        lse[i] = __ldcg(work.partial_lse + place);
        values[i] = __ldcg(reinterpret_cast<const float4*>(
            static_cast<const float*>(work.partial_out) + place * C::kRank + column));
      }
      float next = max;
#pragma unroll
      for (const float one : lse) next = fmaxf(next, one);
      if (next == -infinity()) continue;
      const float rescale = exp2_fast(max - next);
      max = next;
      total *= rescale;
      sum = {sum.x * rescale, sum.y * rescale, sum.z * rescale, sum.w * rescale};
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const float weight = exp2_fast(lse[i] - max);
        total += weight;
        add_scaled(sum, weight, values[i]);
      }
    }
    const float inverse = total > 0 ? __fdividef(1.0f, total) : 0;
    to.store<C>(params_, column,
                {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse},
                total > 0 ? max + log2f(total) : -infinity());
  }

  const MlaDecodeParams& params_;
  typename C::SharedMemory& shared_;
  const RowTile& tile_;
  const PartGroup& group_;
};

// Takes threads that have no part in a join through both phases of the cluster's barrier. They have
// arrived at the first.
__device__ __forceinline__ void pass_cluster() {
  __syncwarp();
  cluster_wait();
  cluster_arrive_relaxed();
  cluster_wait();
}

}  // namespace fovea::kernels::cuda
