// SPDX-License-Identifier: Apache-2.0
// Parts of a row tile that blocks of a cluster computed, joined in their shared memory: each block
// gets its share of the tile's rows from all of them and writes what they add up to. Where a tile
// has parts in several clusters their sums go to memory, and the block that stores the last one of
// a row adds up the row. The order of the sums does not depend on who that is.
#pragma once

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

// The other members' parts of this block's rows, [members of the group, rows of this block]: over
// the ring of keys, which is free when all blocks of the cluster are done with their only item.
template <class C>
__device__ __forceinline__ typename C::PartRow* joined_rows(typename C::SharedMemory& shared) {
  static_assert((C::kRows + kMlaMaxCluster - 1) * sizeof(typename C::PartRow) <= sizeof(shared.kv));
  return reinterpret_cast<typename C::PartRow*>(&shared.kv);
}

// Row `row` of this block's share, of `member`.
template <class C>
__device__ __forceinline__ const typename C::PartRow& part_row(typename C::SharedMemory& shared,
                                                               const PartGroup& group, int member,
                                                               int row) {
  return member == group.own ? shared.cluster.own[group.own * group.share + row]
                             : joined_rows<C>(shared)[member * group.rows + row];
}

// Of one row and member, whose number is lane / 2: rows one after the other.
struct PartFactor {
  float factor;  // what the part's values are multiplied by
  float lse;     // of the row, in powers of two

  // The same in all warps, for some row's parts.
  template <class C>
  __device__ __forceinline__ static PartFactor find(typename C::SharedMemory& shared,
                                                    const PartGroup& group) {
    const int lane = threadIdx.x % 32;
    const int member = lane / 2 & (group.size - 1);
    const int row = min(lane / 2 >> group.log_size, group.rows - 1);
    const auto& from = part_row<C>(shared, group, member, row);
    const float4 sums = *reinterpret_cast<const float4*>(&from.sums[lane % 2 * 4]);
    const float own = from.most;
    float total = sums.x + sums.y + sums.z + sums.w;
    float most = own;
    total += __shfl_xor_sync(~0u, total, 1);
#pragma unroll
    for (int step = 1; step < kMlaMaxCluster; step *= 2) {
      if (step < group.size) most = fmaxf(most, __shfl_xor_sync(~0u, most, 2 * step));
    }
    const float weight = exp2_fast(own - most);
    total *= weight;
#pragma unroll
    for (int step = 1; step < kMlaMaxCluster; step *= 2) {
      if (step < group.size) total += __shfl_xor_sync(~0u, total, 2 * step);
    }
    if (!(total > 0)) return {0, -infinity()};
    return {weight * __fdividef(1.0f, total), most + log2f(total)};
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
__device__ __forceinline__ float4 sum_group(typename C::SharedMemory& shared,
                                            const PartGroup& group, const PartFactor& factors,
                                            int row, int column) {
  constexpr int kAtOnce = 8;
  float4 all = {0, 0, 0, 0};
#pragma unroll 1
  for (int first = 0; first < group.size; first += kAtOnce) {
    uint2 values[kAtOnce];
    float factor[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int member = min(first + i, group.size - 1);
      const auto& from = part_row<C>(shared, group, member, row);
      values[i] = *reinterpret_cast<const uint2*>(&from.values[column]);
      factor[i] = __shfl_sync(~0u, factors.factor, 2 * ((row << group.log_size) + member)) *
                  (first + i < group.size ? from.units[column / C::kWarpColumns] : 0.0f);
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
    const int64_t token = tile.view.q_begin + packed / params.batch.q_heads;
    const int head = packed % params.batch.q_heads;
    out = token * params.out_token_stride + head * params.out_head_stride;
    lse = token * params.batch.q_heads + head;
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

// Copies `bytes` at `from` to where `there` is in block `rank`, and counts them at its `barrier`.
// One thread, after a fence of the async proxy if others stored them.
__device__ __forceinline__ void send_in_cluster(const void* from, void* there, uint32_t rank,
                                                int bytes, TransactionBarrier& barrier) {
  asm volatile(
      "{\n.reg .b32 to, full;\nmapa.shared::cluster.u32 to, %1, %2;\n"
      "mapa.shared::cluster.u32 full, %4, %2;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%0], %3, "
      "[full];\n}" ::"r"(shared_address(from)),
      "r"(shared_address(there)), "r"(rank), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

// Counts this block's rows as stored; last: those that all clusters have stored now.
template <class C>
__device__ __forceinline__ void take_tickets(const MlaWorkList& work, const PartGroup& group,
                                             int thread, typename C::SharedMemory& shared) {
  named_barrier_wait(kConsumersBarrier, kConsumerThreads);
  if (thread < group.rows) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(work.arrivals + group.first * C::kRows + group.own * group.share + thread),
                   "r"(group.segments - 1)
                 : "memory");
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

// After the blocks of the group have put down their parts in ClusterMemory::own, each behind a
// fence of the async proxy. 256 threads, which meet here and have arrived at the cluster's barrier
// when the ring was free; at its next phase they arrive here.
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
  if (thread + 1 < group.size) {
    // Each begins with the next: no block is the last one for all.
    int to = group.own + thread + 1;
    if (to >= group.size) to -= group.size;
    const int rows = group.rows_of(tile, to);
    const auto rank = static_cast<uint32_t>(group.begin + to) & (work.cluster - 1);
    if (rows > 0) {
      send_in_cluster(&shared.cluster.own[to * group.share],
                      joined_rows<C>(shared) + group.own * rows, rank, rows * kRowBytes,
                      shared.cluster.parts_full);
    }
  }
  const int first_row = group.own * group.share;
  const int own_row = thread / kRowThreads;
  const int column = thread % kRowThreads * 4;
  JoinedPlace place(params, tile, first_row + own_row);
  shared.cluster.parts_full.wait(0);
  __syncwarp();
  cluster_arrive_relaxed();
  if (own_row < group.rows) {
    const auto factors = PartFactor::find<C>(shared, group);
#pragma unroll 1
    for (int row = own_row; row < group.rows; row += kRowsAtOnce) {
      if (row > own_row) place = JoinedPlace(params, tile, first_row + row);
      const float4 sum = sum_group<C>(shared, group, factors, row, column);
      const float lse = __shfl_sync(~0u, factors.lse, 2 * (row << group.log_size));
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

// Both phases of the cluster's barrier, for threads that have no part in a join.
__device__ __forceinline__ void pass_cluster() {
  __syncwarp();
#pragma unroll
  for (int phase = 0; phase < 2; ++phase) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
}

}  // namespace fovea::kernels::cuda
