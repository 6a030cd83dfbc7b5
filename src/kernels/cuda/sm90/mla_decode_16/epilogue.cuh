// SPDX-License-Identifier: Apache-2.0
// The sums that a consumer thread holds, and their way to memory or to other blocks of a cluster.
#pragma once

#include "kernels/cuda/sm90/mla_common/masks.cuh"
#include "kernels/cuda/sm90/mla_common/outputs.cuh"
#include "kernels/cuda/sm90/mla_decode_16/block_join.cuh"
#include "kernels/cuda/sm90/mla_decode_16/cluster_join.cuh"

namespace fovea::kernels::cuda {

// out[j][2 * r + c] is row row_of(r), column 8 * j + lane % 4 * 2 + c of the warp's columns.
template <class C>
struct Sums {
  float out[C::kWarpColumns / 8][4] = {};
  float max[2] = {kLowest, kLowest};  // the maxima that weights refer to, as powers of two
  float sum[2] = {};                  // sums of the weights of this thread's keys

  // The sum of row_of(r) over the warp's keys.
  __device__ __forceinline__ float warp_sum(int r) const {
    float total = sum[r];
    total += __shfl_xor_sync(~0u, total, 1);
    return total + __shfl_xor_sync(~0u, total, 2);
  }
  // The largest magnitude of row_of(r) in the warp's columns.
  __device__ __forceinline__ float largest(int r) const {
    float largest = 0;
#pragma unroll
    for (const auto& columns : out) {
      largest = fmaxf(largest, fmaxf(fabsf(columns[2 * r]), fabsf(columns[2 * r + 1])));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }

  // Stores the warp's columns of row_of(r) times `factor` as f16.
  __device__ __forceinline__ void store_part(int r, uint16_t* to, bool valid, float factor) const {
#pragma unroll
    for (int j = 0; j < C::kWarpColumns / 8; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[k] = pack<f16>(out[j + k][2 * r] * factor, out[j + k][2 * r + 1] * factor);
      }
      store_words(to + 8 * j, valid, words);
    }
  }
  // Stores the warp's columns of row_of(r) times `factor` as output; `to` is this lane's first
  // column. Two lanes swap columns, so that each has four next to each other and four lanes
  // have 16.
  __device__ __forceinline__ void store_output(int r, uint16_t* to, bool valid,
                                               float factor) const {
    const bool odd = threadIdx.x % 2;
#pragma unroll
    for (int j = 0; j < C::kWarpColumns / 8; j += 2) {
      const uint32_t low = pack<C::kQ>(out[j][2 * r] * factor, out[j][2 * r + 1] * factor);
      const uint32_t high = pack<C::kQ>(out[j + 1][2 * r] * factor, out[j + 1][2 * r + 1] * factor);
      const uint32_t got = __shfl_xor_sync(~0u, odd ? low : high, 1);
      const uint2 words = odd ? uint2{got, high} : uint2{low, got};
      if (valid) *reinterpret_cast<uint2*>(to + 8 * j) = words;
    }
  }
};

// Index of a block's row among the rows of partial results.
template <class C>
__device__ __forceinline__ int64_t part_row(const RowTile& tile, int row) {
  const MlaItem& item = tile.item;
  int slot = item.partial;
  if constexpr (!C::kClusters) {
    slot = slot_of_worker(block_worker<C>(), first_of_parts(item.partial));
  }
  const int first = tile.first_row - item.first_row;
  return static_cast<int64_t>(slot) * (C::kBlocks * C::kRows) + first + row;
}

// Gives the sums of each row over the warp's keys to all warps, and with `part` the largest value
// in the warp's columns.
template <class C>
__device__ __forceinline__ void share_sums(typename C::SharedMemory& shared, bool part,
                                           const Sums<C>& sums) {
  const int lane = threadIdx.x % 32;
  const int warp = consumer_warp();
  sync_consumers();  // sums of the preceding item have been read
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sums.warp_sum(r);
    const float largest = part ? sums.largest(r) : 0;
    if (lane % 4 == 0) {
      shared.sums[row_of(r)][warp] = sum;
      if (part) shared.maxima[row_of(r)][warp] = largest;
    }
  }
  sync_consumers();
}

// Stores a row tile, or a part of one as f16 in multiples of a unit for each half of the columns.
// All consumer threads.
template <class C>
__device__ __forceinline__ void store_sums(const MlaDecodeParams& params,
                                           typename C::SharedMemory& shared, const RowTile& tile,
                                           const Sums<C>& sums) {
  const int lane = threadIdx.x % 32;
  const int warp = consumer_warp();
  const bool part = !C::kClusters && tile.item.partial >= 0;
  share_sums<C>(shared, part, sums);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of(r);
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kConsumerWarps; ++w) sum += shared.sums[row][w];
    const float inverse = sum > 0 ? __fdividef(1.0f, sum) : 0;
    const bool valid = row < tile.rows;
    const int packed = tile.first_row + (valid ? row : 0);
    const int64_t token = tile.view.q_begin + packed / params.q_heads;
    const int head = packed % params.q_heads;
    const int64_t place = part ? part_row<C>(tile, row) : 0;
    if (valid && warp == 0 && lane % 4 == 0) {
      const float lse = sum > 0 ? (sums.max[r] + log2f(sum)) * kLn2 : -infinity();
      if (part) {
        params.work.partial_lse[place] = lse;
      } else if (params.out.lse) {
        params.out.lse[token * params.q_heads + head] = lse;
      }
    }
    const int first = warp * C::kWarpColumns;
    if (part) {
      const int half = 2 * warp / kConsumerWarps;
      const auto& of_half = reinterpret_cast<const float4*>(shared.maxima[row])[half];
      const float largest = fmaxf(fmaxf(of_half.x, of_half.y), fmaxf(of_half.z, of_half.w));
      const uint32_t unit = unit_bits(largest * inverse);
      const float factor = inverse * inverse_unit(unit);
      if (valid && warp % 4 == 0 && lane % 4 == 0) {
        params.work.partial_units[2 * place + half] = __uint_as_float(unit);
      }
      sums.store_part(r, static_cast<uint16_t*>(params.work.partial_out) + place * C::kRank + first,
                      valid, factor);
      continue;
    }
    const bool odd = lane % 2;
    uint16_t* to = static_cast<uint16_t*>(params.out.data) + token * params.out.token_stride +
                   head * params.out.head_stride + first + odd * 8 + lane % 4 / 2 * 4;
    sums.store_output(r, to, valid, inverse);
  }
}

// Writes the block's part to ClusterMemory: its own rows to where it joins them, the others to
// where it sends them from.
template <class C>
__device__ __forceinline__ void write_part(typename C::SharedMemory& shared, const PartGroup& group,
                                           const Sums<C>& sums) {
  const int lane = threadIdx.x % 32;
  const int warp = consumer_warp();
  const float largest[2] = {sums.largest(0), sums.largest(1)};
  const float totals[2] = {sums.warp_sum(0), sums.warp_sum(1)};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t unit = unit_bits(largest[r]);
    const float factor = inverse_unit(unit);
    const int joined = row_of(r) - group.own * group.share;  // among the rows that this block joins
    auto& row = joined >= 0 && joined < group.rows
                    ? shared.cluster.joined[group.own * group.rows + joined]
                    : shared.cluster.own[row_of(r)];
    if (lane % 4 == 0) {
      row.units[warp] = __uint_as_float(unit);
      row.sums[warp] = totals[r];
      if (warp == 0) row.max = sums.max[r];
    }
    uint16_t* to = row.values + warp * C::kWarpColumns + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < C::kWarpColumns / 8; ++j) {
      *reinterpret_cast<uint32_t*>(to + 8 * j) =
          pack<f16>(sums.out[j][2 * r] * factor, sums.out[j][2 * r + 1] * factor);
    }
  }
}

}  // namespace fovea::kernels::cuda
