// SPDX-License-Identifier: Apache-2.0
// Parts of a row tile that blocks of a cluster computed, joined in their shared memory: each block
// gets its share of the tile's rows from all of them and writes what they add up to. Where a tile
// has parts in several clusters their sums go to memory, and the block that stores the last one of
// a row adds up the row. The order of the sums does not depend on who that is.
#pragma once

#include "kernels/cuda/sm90/mla_decode/epilogue.cuh"

namespace fovea::kernels::cuda {

// The blocks of this cluster that have parts of a row tile.
struct PartGroup {
  int first;        // worker that has the tile's first part
  int shift;        // log2 of the blocks of a cluster
  int segments;     // clusters that have parts
  int begin, size;  // first worker of the group, and how many
  int own;          // number of this block in it
  int share;        // rows of the tile that a block joins
  int rows;         // this one's: share, or less

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
    share = (tile.rows + size - 1) / size;
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

// Over the ring of keys, which is free when all blocks of the cluster are done with their only
// item.
template <class C>
struct ClusterParts {
  // Sums of weighted values as f16, in multiples of a power of two for each warp's columns of a
  // half. Rows are so far apart that lanes which store what they have of eight rows use all banks.
  struct alignas(16) Row {
    uint16_t values[C::kRank];
    float units[8];
    float sums[4];  // of weights relative to 2^most, of each warp's keys
    float most;
    float unused[7];
  };
  static_assert(sizeof(Row) % 128 == 80);
  Row own[C::kRows];
  Row joined[C::kRows + kMlaMaxCluster - 1];  // [members of the group, rows of this block], but own
};
template <class C>
__device__ __forceinline__ ClusterParts<C>& cluster_parts(typename C::SharedMemory& shared) {
  static_assert(sizeof(ClusterParts<C>) <= sizeof(shared.kv));
  return *reinterpret_cast<ClusterParts<C>*>(&shared.kv);
}

// Four columns of a row: `values` relative to 2^most, as is their weight `total`.
struct PartSum {
  float most, total;
  float4 values;

  __device__ __forceinline__ float4 result() const {
    const float inverse = total > 0 ? __fdividef(1.0f, total) : 0;
    return {values.x * inverse, values.y * inverse, values.z * inverse, values.w * inverse};
  }
  // In powers of two.
  __device__ __forceinline__ float lse() const {
    return total > 0 ? most + log2f(total) : -infinity();
  }
};

// The first `count` parts, added in their order, eight at a time: part(i) for i < count.
template <typename Part>
__device__ __forceinline__ PartSum sum_parts(int count, Part part) {
  constexpr int kAtOnce = 8;
  PartSum sum = {-infinity(), 0, {0, 0, 0, 0}};
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
    PartSum parts[kAtOnce];
    float most = sum.most;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) parts[i] = part(min(first + i, count - 1));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) most = fmaxf(most, parts[i].most);
    if (most == -infinity()) continue;
    const auto add = [&](const PartSum& one, float weight) {
      sum.total = fmaf(weight, one.total, sum.total);
      sum.values.x = fmaf(weight, one.values.x, sum.values.x);
      sum.values.y = fmaf(weight, one.values.y, sum.values.y);
      sum.values.z = fmaf(weight, one.values.z, sum.values.z);
      sum.values.w = fmaf(weight, one.values.w, sum.values.w);
    };
    const PartSum before = sum;
    sum = {most, 0, {0, 0, 0, 0}};
    add(before, exp2_fast(before.most - most));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      add(parts[i], first + i < count ? exp2_fast(parts[i].most - most) : 0.0f);
    }
  }
  return sum;
}

// Columns column to column + 3 of row `row` of this block's share, over the group.
template <class C>
__device__ __forceinline__ PartSum sum_group(const ClusterParts<C>& parts, const PartGroup& group,
                                             int row, int column) {
  const int unit = column / C::kValueColumns * 4 + column % kTileColumns / 16;
  return sum_parts(group.size, [&](int member) -> PartSum {
    const auto& from = member == group.own ? parts.own[group.own * group.share + row]
                                           : parts.joined[member * group.rows + row];
    const uint2 v = *reinterpret_cast<const uint2*>(&from.values[column]);
    const float4 sums = *reinterpret_cast<const float4*>(from.sums);
    const float scale = from.units[unit];
    return {from.most,
            sums.x + sums.y + sums.z + sums.w,
            {to_float<f16>(static_cast<uint16_t>(v.x)) * scale,
             to_float<f16>(static_cast<uint16_t>(v.x >> 16)) * scale,
             to_float<f16>(static_cast<uint16_t>(v.y)) * scale,
             to_float<f16>(static_cast<uint16_t>(v.y >> 16)) * scale}};
  });
}

template <class C>
__device__ __forceinline__ void store_joined(const MlaDecodeParams& params, const RowTile& tile,
                                             int row, int column, const PartSum& sum) {
  const int packed = tile.first_row + row;
  const int64_t token = tile.view.q_begin + packed / params.batch.q_heads;
  const int head = packed % params.batch.q_heads;
  auto* to = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
             head * params.out_head_stride + column;
  const float4 v = sum.result();
  *reinterpret_cast<uint2*>(to) = {pack<C::kQ>(v.x, v.y), pack<C::kQ>(v.z, v.w)};
  if (params.lse && column == 0) {
    params.lse[token * params.batch.q_heads + head] = sum.lse() * kLn2;
  }
}

constexpr int kJoinThreads = 2 * kWarpgroupThreads;
constexpr int kJoinBarrier = 1;

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
  named_barrier_wait(kJoinBarrier, kJoinThreads);
  if (thread < group.rows) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(work.arrivals + group.first * C::kRows + group.own * group.share + thread),
                   "r"(group.segments - 1)
                 : "memory");
    shared.cluster.last[thread] = before == static_cast<uint32_t>(group.segments - 1);
  }
  named_barrier_wait(kJoinBarrier, kJoinThreads);
}

// The same over all clusters, from memory.
template <class C>
__device__ __forceinline__ PartSum sum_segments(const MlaWorkList& work, const PartGroup& group,
                                                int row, int column) {
  return sum_parts(group.segments, [&](int segment) -> PartSum {
    const int64_t place = int64_t{group.segment_begin(segment)} * C::kRows + row;
    const float lse = __ldcg(work.partial_lse + place);
    return {lse, lse == -infinity() ? 0.0f : 1.0f,
            __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(work.partial_out) +
                                                   place * C::kRank + column))};
  });
}

// After the blocks of the group have put down their parts in ClusterParts::own, each behind a fence
// of the async proxy. 256 threads, which meet here and have arrived at the cluster's barrier when
// the ring was free; at its next phase they arrive here.
template <class C>
__device__ __forceinline__ void join_in_cluster(const MlaDecodeParams& params, const RowTile& tile,
                                                const PartGroup& group,
                                                typename C::SharedMemory& shared) {
  using Row = typename ClusterParts<C>::Row;
  constexpr int kQuads = C::kRank / 4;
  const MlaWorkList& work = params.work;
  ClusterParts<C>& parts = cluster_parts<C>(shared);
  const int thread = static_cast<int>(threadIdx.x) - kWarpgroupThreads;
  if (thread == 0) {
    shared.cluster.parts_full.arrive_expecting((group.size - 1) * group.rows *
                                               static_cast<int>(sizeof(Row)));
  }
  named_barrier_wait(kJoinBarrier, kJoinThreads);
  cluster_wait();
  if (thread + 1 < group.size) {
    // Each begins with the next: no block is the last one for all.
    int to = group.own + thread + 1;
    if (to >= group.size) to -= group.size;
    const int rows = group.rows_of(tile, to);
    const auto rank = static_cast<uint32_t>(group.begin + to) & (work.cluster - 1);
    if (rows > 0) {
      send_in_cluster(&parts.own[to * group.share], &parts.joined[group.own * rows], rank,
                      rows * static_cast<int>(sizeof(Row)), shared.cluster.parts_full);
    }
  }
  shared.cluster.parts_full.wait(0);
  __syncwarp();
  cluster_arrive_relaxed();
  const int first_row = group.own * group.share;
#pragma unroll 1
  for (int i = thread; i < group.rows * kQuads; i += kJoinThreads) {
    const int row = i / kQuads;
    const int column = i % kQuads * 4;
    const PartSum sum = sum_group<C>(parts, group, row, column);
    if (group.segments == 1) {
      store_joined<C>(params, tile, first_row + row, column, sum);
    } else {
      const int64_t place = int64_t{group.begin} * C::kRows + first_row + row;
      *reinterpret_cast<float4*>(static_cast<float*>(work.partial_out) + place * C::kRank +
                                 column) = sum.result();
      if (column == 0) work.partial_lse[place] = sum.lse();
    }
  }
  if (group.segments > 1) {
    take_tickets<C>(work, group, thread, shared);
#pragma unroll 1
    for (int i = thread; i < group.rows * kQuads; i += kJoinThreads) {
      const int row = i / kQuads;
      const int column = i % kQuads * 4;
      if (!shared.cluster.last[row]) continue;
      store_joined<C>(params, tile, first_row + row, column,
                      sum_segments<C>(work, group, first_row + row, column));
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
