// SPDX-License-Identifier: Apache-2.0
// From the sums of a segment to out and lse.
#pragma once

#include "kernels/cuda/sm90/few_rows/weights.cuh"

namespace fovea::kernels::cuda {

template <class Config>
class RowResults : protected SegmentWeights<Config> {
 protected:
  using Base = SegmentWeights<Config>;
  using Base::lane_, Base::params_, Base::row_of, Base::rows, Base::shared_;
  using typename Base::SharedMemory;

  // `column`: first of the warp's 16 columns; with head_dim_v or more the warp has none.
  __device__ RowResults(const PrefillParams& params, SharedMemory& shared, int column)
      : Base(params, shared), column_(column) {}

  // Adds the segment to the later ones, or stores it for the block that joins the cut tile.
  __device__ void end_segment(const CutSlot& slot, const SegmentWalk<Config>& segment,
                              const float (&values)[4], bool later, float4& sum,
                              RowSums (&sums)[2]) {
    const RowSums own[2] = {shared_.sums[row_of(0)], shared_.sums[row_of(1)]};
    if (is_cut(slot)) {
      const int at =
          partial_row(params_, slot, segment.last / Config::kSegmentBlocks - slot.cut.first);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int row = row_of(x % 2);
        const int column = column_ + lane_ / 4 + x / 2 * 8;
        if (row >= rows(slot.work) || column >= Config::kHeadDimV) continue;
        params_.segments.out[static_cast<int64_t>(at + row) * Config::kHeadDimV + column] =
            values[x];
        if (column == 0) params_.segments.sums[at + row] = own[x % 2];
      }
      return;
    }
    Join join[2] = {kNoneLater, kNoneLater};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (later) {
        join[i] = join_rows(sums[i], own[i]);
      } else {
        sums[i] = own[i];
      }
    }
    sum = {join_values(join[0], sum.x, values[0]), join_values(join[1], sum.y, values[1]),
           join_values(join[0], sum.z, values[2]), join_values(join[1], sum.w, values[3])};
  }

  __device__ uint16_t* out_of(const WorkTile& work, int row, int column) const {
    const AttentionParams& attention = params_.attention;
    return static_cast<uint16_t*>(attention.out) +
           (work.q_begin + row_token(params_, work, 0, row)) * attention.out_token_stride +
           row_head(params_, work, row) * attention.out_head_stride + column;
  }

  __device__ void store(const WorkTile& work, const float4& sum, const RowSums (&sums)[2]) {
    if (column_ >= Config::kHeadDimV) return;
    const bool writes = column_ == 0 && lane_ < 4;
    const float factor[2] = {finish_row(params_, work, 0, row_of(0), sums[0], writes),
                             finish_row(params_, work, 0, row_of(1), sums[1], writes)};
    const uint32_t low = pack<Config::kQ>(mean(sum.x, factor[0]), mean(sum.y, factor[1]));
    const uint32_t high = pack<Config::kQ>(mean(sum.z, factor[0]), mean(sum.w, factor[1]));
    const uint32_t pairs[2] = {transposed_8x8(low), transposed_8x8(high)};
    const int row = lane_ / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = column_ + half * 8 + lane_ % 4 * 2;
      if (row >= rows(work) || column >= params_.attention.head_dim_v) continue;
      *reinterpret_cast<uint32_t*>(out_of(work, row, column)) = pairs[half];
    }
  }

  // Adds up all segments of a cut tile if this block has stored the last missing ones. `sharers`:
  // blocks that each store some columns of a segment.
  __device__ void join_cut(const CutSlot& slot, int sharers) {
    meet_computing<Config>();  // all warps have stored
    if (threadIdx.x == 0) shared_.joins = last_stored(params_, slot, sharers);
    meet_computing<Config>();
    if (!shared_.joins) return;
    const WorkTile& work = slot.work;
    constexpr int kLanes = Config::kHeadDimV / 4;  // lanes of a row
    constexpr int kPrefetched = 8;                 // segments loaded at a time
    const int row = threadIdx.x / kLanes;
    const int column = threadIdx.x % kLanes * 4;
    if (row >= rows(work)) return;
    RowSums sums = {kNothing, 0};
    float4 values = {};
#pragma unroll 1
    for (int last = slot.cut.count - 1; last >= 0; last -= kPrefetched) {
      RowSums own_sums[kPrefetched];
      float4 own[kPrefetched];
#pragma unroll
      for (int i = 0; i < kPrefetched; ++i) {
        const int64_t at = partial_row(params_, slot, max(last - i, 0)) + row;
        const float2 found = __ldcg(reinterpret_cast<const float2*>(params_.segments.sums + at));
        own_sums[i] = last - i < 0 ? RowSums{kNothing, 0} : RowSums{found.x, found.y};
        own[i] = __ldcg(reinterpret_cast<const float4*>(params_.segments.out +
                                                        at * Config::kHeadDimV + column));
      }
#pragma unroll
      for (int i = 0; i < kPrefetched; ++i) {
        const Join join = join_rows(sums, own_sums[i]);
        values = join_values(join, values, own[i]);
      }
    }
    const float factor = finish_row(params_, work, 0, row, sums, column == 0);
    if (column >= params_.attention.head_dim_v) return;
    *reinterpret_cast<uint2*>(out_of(work, row, column)) = {
        pack<Config::kQ>(mean(values.x, factor), mean(values.y, factor)),
        pack<Config::kQ>(mean(values.z, factor), mean(values.w, factor))};
  }

  const int column_;
};

}  // namespace fovea::kernels::cuda
