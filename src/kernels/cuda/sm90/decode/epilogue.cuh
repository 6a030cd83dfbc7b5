// SPDX-License-Identifier: Apache-2.0
// Joins the results of the warps of an item. If several CTAs share a tile, the last one to finish
// joins their parts, always in ascending order of keys. CTAs of a cluster send their parts to the
// CTA that has the first.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/counters.cuh"
#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/sm90/decode/mainloop.cuh"

namespace fovea::kernels::cuda {

// Four adjacent columns of a result row; `sum` is the sum of weights relative to 2^most.
struct RowPart {
  float most;
  float sum;
  float4 out;
};

__device__ inline float4 scaled(const float4& x, float factor) {
  return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}

constexpr int kConsumerBarrier = 1;

template <class C>
__device__ void wait_for_consumers() {
  named_barrier_wait(kConsumerBarrier, C::kConsumers);
}

// Joins parts in their order. Parts without weight may be unwritten.
template <int kParts>
__device__ RowPart join(const RowPart (&parts)[kParts]) {
  float most = parts[0].most;
#pragma unroll
  for (int i = 1; i < kParts; ++i) most = fmaxf(most, parts[i].most);
  const float base = most == -infinity() ? 0.0f : most;
  RowPart joined = {most, 0, {0, 0, 0, 0}};
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const float weight = exp2_fast(parts[i].most - base);
    const bool counts = weight > 0;
    joined.sum += counts ? parts[i].sum * weight : 0.0f;
    joined.out.x += counts ? parts[i].out.x * weight : 0.0f;
    joined.out.y += counts ? parts[i].out.y * weight : 0.0f;
    joined.out.z += counts ? parts[i].out.z * weight : 0.0f;
    joined.out.w += counts ? parts[i].out.w * weight : 0.0f;
  }
  return joined;
}

// Writes four columns of out; the thread with column 0 writes lse too.
template <class C>
__device__ void store_row(const DecodeParams& params, const Tile& tile, int head, int row,
                          int column, const RowPart& part) {
  const int64_t token = tile.view.q_begin + tile.token_of(row);
  const int q_head = tile.q_head_of(head, row);
  const bool empty = !(part.sum > 0);
  float factor = empty ? 0.0f : __fdividef(1.0f, part.sum);
  if (params.sinks || (params.lse && column == 0)) {
    const float lse = empty ? -infinity() : (part.most + __log2f(part.sum)) * kLn2;
    if (params.lse && column == 0) params.lse[token * params.lse_token_stride + q_head] = lse;
    if (params.sinks && !empty) factor /= 1 + __expf(params.sinks[q_head] - lse);
  }
  const float4 value = scaled(part.out, factor);
  auto* to = static_cast<uint16_t*>(params.out) + token * params.out_token_stride +
             q_head * params.out_head_stride + column;
  *reinterpret_cast<uint2*>(to) = {pack<C::kQ>(value.x, value.y), pack<C::kQ>(value.z, value.w)};
}

// Stores the maxima and sums of this warp in shared memory.
template <class C>
__device__ void store_stats(const Accumulator<C>& acc, typename C::SharedMemory& shared) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < C::kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = acc.sum[n][i];
#pragma unroll
      for (int step = 4; step <= 16; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane < 4)
        shared.stats[threadIdx.x / 32][n * 8 + lane % 4 * 2 + i] = {acc.most[n][i], sum};
    }
  }
}

// Stores rows 8n to 8n + 7 of this warp's accumulators in shared memory.
template <class C>
__device__ void store_rows(const Accumulator<C>& acc, int n, typename C::SharedMemory& shared) {
  const int lane = threadIdx.x % 32;
  auto& rows = shared.join[threadIdx.x / 32];
  const float unit = C::kFp8 && acc.v_unit > 0 ? acc.v_unit : 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int d = 0; d < C::kHeadDimV / 16; ++d) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = d * 16 + (C::kFp8 ? lane / 4 * 2 + half : lane / 4 + 8 * half);
        rows[lane % 4 * 2 + i][column] = acc.out[d][n][2 * half + i] * unit;
      }
    }
  }
}

// Joins four columns of a row of one head over the warps that worked on it.
template <class C>
__device__ RowPart join_warps(const typename C::SharedMemory& shared, int heads, int head, int row,
                              int column) {
  const auto part_of = [&](int warp) -> RowPart {
    const float2 stats = shared.stats[warp][row];
    return {stats.x, stats.y,
            *reinterpret_cast<const float4*>(&shared.join[warp][row % 8][column])};
  };
  if (heads > 1) {
    RowPart joined = {-infinity(), 0, {0, 0, 0, 0}};
#pragma unroll 1
    for (int warp = head; warp < C::kWarps; warp += heads) {
      const RowPart two[2] = {joined, part_of(warp)};
      joined = join(two);
    }
    return joined;
  }
  RowPart parts[C::kWarps];
#pragma unroll
  for (int warp = 0; warp < C::kWarps; ++warp) parts[warp] = part_of(warp);
  return join(parts);
}

// Returns the index of a head's row in a partial slot.
template <class C>
__device__ int64_t partial_row(const DecodeParams& params, int slot, int head, int row) {
  return (static_cast<int64_t>(slot) * params.list.max_heads + head) * C::kRowTile + row;
}

constexpr int kFewParts = 4;

// Joins up to kFewParts parts. A lane loads all parts of two quads (four columns of a row) at once,
// because trips to the L2 take the time; one lane a quad, because there may be thousands of quads.
template <class C>
__device__ void join_few_parts(const DecodeParams& params, const Tile& tile) {
  constexpr int kQuads = C::kHeadDimV / 4;
  constexpr int kAtOnce = 2;
  const int elements = tile.item.heads * tile.rows * kQuads;
#pragma unroll 1
  for (int base = threadIdx.x; base < elements; base += kAtOnce * C::kConsumers) {
    int head[kAtOnce], row[kAtOnce], column[kAtOnce];
    RowPart parts[kAtOnce][kFewParts];
#pragma unroll
    for (int q = 0; q < kAtOnce; ++q) {
      const int element = min(base + q * C::kConsumers, elements - 1);
      column[q] = element % kQuads * 4;
      head[q] = quotient(element / kQuads, tile.rows);
      row[q] = element / kQuads - head[q] * tile.rows;
      const int live_column = column[q] < params.head_dim_v ? column[q] : 0;
#pragma unroll
      for (int i = 0; i < kFewParts; ++i) {
        const int part = min(i, tile.item.parts - 1);
        const int slot = part == 0 ? tile.item.first_part : tile.item.first_part + 2 * part - 1;
        const int64_t at = partial_row<C>(params, slot, head[q], row[q]);
        parts[q][i].most = __ldcg(params.list.partial_lse + at);
        parts[q][i].sum = 1;
        parts[q][i].out = __ldcg(reinterpret_cast<const float4*>(
            params.list.partial_out + at * params.head_dim_v + live_column));
      }
    }
#pragma unroll
    for (int q = 0; q < kAtOnce; ++q) {
#pragma unroll
      for (int i = 0; i < kFewParts; ++i) {
        parts[q][i].most = i < tile.item.parts ? parts[q][i].most * kLog2E : -infinity();
      }
      if (base + q * C::kConsumers < elements && column[q] < params.head_dim_v) {
        store_row<C>(params, tile, head[q], row[q], column[q], join(parts[q]));
      }
    }
  }
}

// Joins many parts. Two lanes share a quad: one takes the even parts, one the odd ones, eight at a
// time.
template <class C>
__device__ void join_parts(const DecodeParams& params, const Tile& tile) {
  constexpr int kSharers = 2;
  constexpr int kAtOnce = 8;
  constexpr int kQuads = C::kHeadDimV / 4;
  constexpr int kLanes = 32 / kSharers;
  const int lane = threadIdx.x % 32;
  const int elements = tile.item.heads * tile.rows * kQuads;
  const int count = tile.item.parts;
  for (int base = threadIdx.x / 32 * kLanes; base < elements; base += C::kWarps * kLanes) {
    const int element = min(base + lane % kLanes, elements - 1);
    const int column = element % kQuads * 4;
    const int head = quotient(element / kQuads, tile.rows);
    const int row = element / kQuads - head * tile.rows;
    const bool live = column < params.head_dim_v;
    RowPart joined[2] = {{-infinity(), 0, {0, 0, 0, 0}}, {-infinity(), 0, {0, 0, 0, 0}}};
    for (int first = lane / kLanes; first < count; first += kSharers * kAtOnce) {
      RowPart parts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int part = min(first + i * kSharers, count - 1);
        const int slot = part == 0 ? tile.item.first_part : tile.item.first_part + 2 * part - 1;
        const int64_t at = partial_row<C>(params, slot, head, row);
        parts[i].most = __ldcg(params.list.partial_lse + at);
        parts[i].sum = 1;
        parts[i].out = __ldcg(reinterpret_cast<const float4*>(
            params.list.partial_out + at * params.head_dim_v + (live ? column : 0)));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        parts[i].most = first + i * kSharers < count ? parts[i].most * kLog2E : -infinity();
      }
      joined[1] = join(parts);
      joined[0] = join(joined);
    }
    joined[1].most = __shfl_xor_sync(~0u, joined[0].most, kLanes);
    joined[1].sum = __shfl_xor_sync(~0u, joined[0].sum, kLanes);
    joined[1].out = {__shfl_xor_sync(~0u, joined[0].out.x, kLanes),
                     __shfl_xor_sync(~0u, joined[0].out.y, kLanes),
                     __shfl_xor_sync(~0u, joined[0].out.z, kLanes),
                     __shfl_xor_sync(~0u, joined[0].out.w, kLanes)};
    const RowPart whole = join(joined);
    if (lane < kLanes && base + lane < elements && live)
      store_row<C>(params, tile, head, row, column, whole);
  }
}

// Stores a joined quad in out, or in the item's partial result.
template <class C>
__device__ void store_joined(const DecodeParams& params, const Tile& tile, int head, int row,
                             int column, const RowPart& joined) {
  if (tile.item.partial < 0) {
    store_row<C>(params, tile, head, row, column, joined);
    return;
  }
  const bool empty = !(joined.sum > 0);
  const int64_t at = partial_row<C>(params, tile.item.partial, head, row);
  if (column == 0) {
    params.list.partial_lse[at] = empty ? -infinity() : (joined.most + __log2f(joined.sum)) * kLn2;
  }
  *reinterpret_cast<float4*>(params.list.partial_out + at * params.head_dim_v + column) =
      scaled(joined.out, empty ? 0.0f : __fdividef(1.0f, joined.sum));
}

// The parts of a tile, in the CTA that has the first of them.
template <class C>
struct ClusterParts {
  alignas(16) float rows[kMaxCluster][C::kRowTile][C::kHeadDimV];
};

// The parts land in the last stage of V. If that stage is in use, they land at the start of the
// rings, and the cluster has to synchronize first.
template <class C>
__device__ bool parts_in_rings(const typename C::SharedMemory& shared) {
  if constexpr (sizeof(ClusterParts<C>) > sizeof(shared.v[0])) return true;
  return min(shared.cluster_units * kBoxKeys, shared.stages * C::kStepKeys) >
         (C::kStages - 1) * C::kStepKeys;
}
template <class C>
__device__ ClusterParts<C>& cluster_parts(typename C::SharedMemory& shared) {
  static_assert(sizeof(ClusterParts<C>) <= sizeof(shared.k) + sizeof(shared.v));
  if (parts_in_rings<C>(shared)) return *reinterpret_cast<ClusterParts<C>*>(&shared.k);
  return *reinterpret_cast<ClusterParts<C>*>(&shared.v[C::kStages - 1]);
}

// Sends a joined quad to the CTA that has the tile's first part.
template <class C>
__device__ void send_part(const DecodeParams& params, const Tile& tile, int row, int column,
                          const RowPart& joined, typename C::SharedMemory& shared) {
  const int first = tile.item.first_part / 2;
  const int part = static_cast<int>(blockIdx.x) - first;
  const int leader = cluster_rank() - part;
  store_in_cluster(&cluster_parts<C>(shared).rows[part][row][column], leader, joined.out,
                   shared.parts_full);
  if (column == 0) {
    store_in_cluster(&shared.part_stats[part][row].x, leader, float2{joined.most, joined.sum},
                     shared.parts_full);
  }
}

template <class C>
__device__ void join_cluster(const DecodeParams& params, const Tile& tile,
                             typename C::SharedMemory& shared) {
  constexpr int kQuads = C::kHeadDimV / 4;
  const auto& parts = cluster_parts<C>(shared);
  for (int i = threadIdx.x; i < tile.rows * kQuads; i += C::kConsumers) {
    const int row = i / kQuads;
    const int column = i % kQuads * 4;
    if (column >= params.head_dim_v) continue;
    RowPart joined = {-infinity(), 0, {0, 0, 0, 0}};
#pragma unroll 1
    for (int first = 0; first < tile.item.parts; first += 4) {
      RowPart some[5] = {joined};
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int part = min(first + p, tile.item.parts - 1);
        const float2 stats = shared.part_stats[part][row];
        some[p + 1] = {first + p < tile.item.parts ? stats.x : -infinity(), stats.y,
                       *reinterpret_cast<const float4*>(&parts.rows[part][row][column])};
      }
      joined = join(some);
    }
    store_row<C>(params, tile, 0, row, column, joined);
  }
}

// Finishes an item; called by all computing warps. in_cluster: CTAs of this cluster have the parts
// of the tile, which has one head, and this CTA has no other item.
template <class C>
__device__ void finish_item(const DecodeParams& params, const Tile& tile, const Accumulator<C>& acc,
                            bool in_cluster, typename C::SharedMemory& shared) {
  constexpr int kQuads = C::kHeadDimV / 4;
  const int heads = tile.item.heads;
  const bool leads = in_cluster && tile.item.partial == tile.item.first_part;
  if (leads && threadIdx.x == 0) {
    const int row_bytes = ((params.head_dim_v + 3) / 4 * 4 + 2) * static_cast<int>(sizeof(float));
    shared.parts_full.arrive_expecting(tile.item.parts * tile.rows * row_bytes);
  }
  // A warp that has a head to itself does not wait for the others.
  const auto meet = [alone = heads == C::kWarps && tile.item.partial < 0] {
    if (alone) {
      __syncwarp();
    } else {
      wait_for_consumers<C>();
    }
  };
  store_stats<C>(acc, shared);
#pragma unroll
  for (int n = 0; n < C::kColumns; ++n) {
    if (8 * n >= tile.rows) break;
    store_rows<C>(acc, n, shared);
    // Other CTAs may now overwrite this CTA's rings, whose contents have been used.
    if (in_cluster && n == 0 && parts_in_rings<C>(shared)) cluster_arrive_relaxed();
    meet();
    if (in_cluster && n == 0) cluster_wait();
    const int shift = 31 - __clz(heads);
    // The warps of a head share its rows.
    for (int i = threadIdx.x; i < heads * 8 * kQuads; i += C::kConsumers) {
      const int head = i / 32 & (heads - 1);
      const int quad = (i / 32 >> shift) * 32 + i % 32;
      const int row = 8 * n + quad / kQuads;
      const int column = quad % kQuads * 4;
      if (row >= tile.rows || column >= params.head_dim_v) continue;
      RowPart joined = join_warps<C>(shared, heads, head, row, column);
      if constexpr (C::kFp8) {
        joined.out = scaled(
            joined.out, shared_scale(params.keys, params.keys.v_scale, tile.item.kv_head + head));
      }
      if (in_cluster) {
        send_part<C>(params, tile, row, column, joined, shared);
      } else {
        store_joined<C>(params, tile, head, row, column, joined);
      }
    }
    if (!in_cluster || 8 * (n + 1) < tile.rows) meet();
  }
  if (tile.item.partial < 0) return;
  if (in_cluster) {
    if (!leads) return;
    shared.parts_full.wait(0);
    join_cluster<C>(params, tile, shared);
    return;
  }
  if (threadIdx.x == 0) {
    int32_t* ticket = params.list.tickets + tile.item.first_part;
    const bool last = add_acquire_release(ticket, 1) == tile.item.parts - 1;
    if (last) *ticket = 0;  // ready for the next layer
    shared.is_last = last;
  }
  wait_for_consumers<C>();
  if (!shared.is_last) return;
  if (tile.item.parts <= kFewParts) {
    join_few_parts<C>(params, tile);
  } else {
    join_parts<C>(params, tile);
  }
}

}  // namespace fovea::kernels::cuda
