// SPDX-License-Identifier: Apache-2.0
// Cuts long requests into segments if the walks of a batch would leave multiprocessors idle. All
// segments have the same length; the first one of a request has the rest. Walks that find effects
// of segments come first, at the same time as the first segments, and then all others. Hence a
// request takes as long as one segment in each of two turns, and a request of up to two segments
// stays whole. One warp.
#pragma once

#include "kernels/cuda/common/chunk_params.h"
#include "kernels/cuda/common/scan.cuh"

namespace fovea::kernels::cuda {

constexpr int kMaxCutWalks = 32;  // a lane has one request

class SegmentPlanner {
 public:
  // The plan lists whole requests.
  __device__ SegmentPlanner(const ChunkPlanParams& params, ChunkCounts& counts)
      : params_(params), counts_(counts) {}

  __device__ void run(const ChunkWalk (&whole)[kMaxCutWalks]) {
    if (counts_.walks > kMaxCutWalks || counts_.walks >= params_.room) return;
    const int lane = static_cast<int>(threadIdx.x);
    if (lane < counts_.walks) own_ = whole[lane];
    const int length = find_length();
    if (length > 0) list(length);
  }

 private:
  __device__ static int segments_of(int chunks, int length) {
    return chunks > 2 * length ? (chunks + length - 1) / length : 1;
  }

  // Returns how long a request takes, with kCostOfChunk for a chunk.
  __device__ int time_of(int chunks, int length) const {
    const int segments = segments_of(chunks, length);
    if (segments == 1) return chunks * kCostOfChunk;
    const int first = chunks - (segments - 1) * length;
    return max(first * kCostOfChunk, length * params_.costs.effect) +
           (segments - 1) * params_.costs.join + length * kCostOfChunk;
  }

  // Returns the length of segments that takes the least time; 0 if nothing should be cut. Each lane
  // tries a number of segments of the longest request.
  __device__ int find_length() const {
    const int longest = __reduce_max_sync(~0u, own_.chunks);
    const int segments = 3 + static_cast<int>(threadIdx.x);
    // Outputs, which a first segment has at once, make it slower; so it has fewer chunks.
    const int length =
        max((longest * 5 + 5 * segments - 2) / (5 * segments - 1), params_.min_segment);
    int walks = 0, effects = 0, time = 0;
    for (int i = 0; i < counts_.walks; ++i) {
      const int chunks = __shfl_sync(~0u, own_.chunks, i);
      const int others = segments_of(chunks, length) - 1;
      walks += max(others, 1);
      effects += others;
      time = max(time, time_of(chunks, length));
    }
    time += counts_.chunks * params_.costs.terms;
    const bool fits = effects > 0 && walks <= params_.room && effects <= params_.max_effects;
    const unsigned best = __reduce_min_sync(~0u, fits ? static_cast<unsigned>(time) : ~0u);
    // Whole requests overlap with the terms of chunks.
    const auto whole = static_cast<unsigned>(longest * kCostOfChunk);
    if (best >= whole - whole / 8) return 0;
    const unsigned winners = __ballot_sync(~0u, fits && static_cast<unsigned>(time) == best);
    return __shfl_sync(~0u, length, __ffs(static_cast<int>(winners)) - 1);
  }

  // Lists the walks of the lane's request in place of the whole one.
  __device__ void list(int length) {
    const int others = own_.chunks > 0 ? segments_of(own_.chunks, length) - 1 : 0;
    const int middle = max(others - 1, 0);
    const int last_effect = warp_scan(middle), last_other = warp_scan(others);
    const int effects = __shfl_sync(~0u, last_effect, 31);
    const int early = effects + counts_.walks;
    own_.segments = others + 1;
    own_.first_effect = last_other - others;
    const int lane = static_cast<int>(threadIdx.x);
    if (lane < counts_.walks) {
      set(effects + lane, 0, length);
      for (int i = 0; i < middle; ++i) set(last_effect - middle + i, 1 + i, length);
      for (int i = 0; i < others; ++i) set(early + last_other - others + i, 1 + i, length);
    }
    // Terms of a request's last segment are needed when the other ones have been through.
    const int chain = counts_.walks == 1 ? length * params_.costs.effect / kCostOfChunk : 0;
    counts_.walks = early + __shfl_sync(~0u, last_other, 31);
    counts_.effects = effects;
    counts_.early = early;
    counts_.chain = chain;
  }
  __device__ void set(int walk, int segment, int length) const {
    ChunkWalk part = own_;
    const int first = own_.chunks - (own_.segments - 1) * length;
    part.segment = segment;
    part.before = segment == 0 ? 0 : first + (segment - 1) * length;
    part.first_chunk += part.before;
    part.chunks = segment == 0 ? first : length;
    params_.plan.walks[walk] = part;
  }

  const ChunkPlanParams& params_;
  ChunkCounts& counts_;
  ChunkWalk own_ = {};  // the lane's whole request
};

}  // namespace fovea::kernels::cuda
