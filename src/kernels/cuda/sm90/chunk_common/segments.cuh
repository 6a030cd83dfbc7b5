// SPDX-License-Identifier: Apache-2.0
// Segments of a request that is cut. A segment changes a state S into S matrix + sums. Two walks
// from S = 0 and from rows of the identity without values find both of them, in one block. The walk
// that has the segment's outputs begins at the end of the first segment and joins the effects of
// those between.
#pragma once

#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/sm90/chunk_common/products.cuh"
#include "kernels/cuda/sm90/chunk_common/progress.cuh"
#include "kernels/cuda/sm90/chunk_common/walk.cuh"

namespace fovea::kernels::cuda {

// Returns what readers of a walk's terms wait for. Each of `writers` tasks stores terms of a chunk.
// In the blocks of a walk with outputs `warps` warps read them, and in others one.
__device__ __forceinline__ Progress terms_of(const ChunkParams& params, const Walk& walk, int n,
                                             int writers, int warps) {
  const int readers =
      (warps + walk.is_walked_twice()) * params.value_heads * (params.value_dim / kBlockValues);
  return {params.plan.progress + walk.first_chunk + n, static_cast<uint32_t>(writers),
          static_cast<uint32_t>(readers)};
}

// Returns a part of the effect of the n-th segment of a walk's request.
__device__ __forceinline__ SegmentEffect& effect_of(const ChunkParams& params, const Walk& walk,
                                                    int n, int part) {
  const int place = (walk.first_effect + n) * params.value_heads + walk.head;
  return params.plan.effects[place * kParts + part];
}
// Returns its counter. Warpgroups write sums and matrix, and all later segments with outputs read.
__device__ __forceinline__ Progress found_of(const ChunkParams& params, const Walk& walk, int n) {
  return {params.plan.found + (walk.first_effect + n) * params.value_heads + walk.head,
          static_cast<uint32_t>(n == 0 ? kParts : 2 * kParts),
          static_cast<uint32_t>((walk.segments - 1 - n) * kParts)};
}

// Returns the stages of a ring that a walk takes before its chunks: one for the first segment,
// which is empty, and one for each part of the matrix of every other one before the walk.
__device__ __forceinline__ int stages_of_effects(const Walk& walk) {
  return walk.segment == 0 ? 0 : 1 + (walk.segment - 1) * kParts;
}

// A ring of stages, each with room for a matrix().
template <typename Stage, int kStages>
struct EffectRing {
  Stage (&stages)[kStages];
  TransactionBarrier (&full)[kStages], (&empty)[kStages];
  Ring<kStages>& at;
};

// A warp loads the matrices of the segments before the walk.
template <typename Stage, int kStages>
__device__ __forceinline__ void load_effects(const ChunkParams& params, const Walk& walk,
                                             EffectRing<Stage, kStages> ring) {
#pragma unroll 1
  for (int n = 0; n < walk.segment; ++n) {
    found_of(params, walk, n).wait(1);
#pragma unroll 1
    for (int part = 0; part < (n == 0 ? 1 : kParts); ++part, ring.at.advance()) {
      if (threadIdx.x % 32 != 0) continue;
      const int stage = ring.at.stage;
      ring.empty[stage].wait(ring.at.phase ^ 1);
      ring.full[stage].arrive_expecting(n == 0 ? 0 : sizeof(SegmentMatrix));
      if (n == 0) continue;
      load_bytes(&ring.stages[stage].matrix(), &effect_of(params, walk, n, part).matrix,
                 sizeof(SegmentMatrix), ring.full[stage]);
    }
  }
}

__device__ __forceinline__ void sync_warpgroup() {
  named_barrier_wait(1 + static_cast<int>(threadIdx.x) / kWarpgroupThreads, kWarpgroupThreads);
}

__device__ __forceinline__ void set_identity(float (&rows)[64], int part) {
  const Place place;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int row = part * kBlockValues + place.row + i % 4 / 2 * 8;
    rows[i] = row == i / 4 * 8 + place.column + i % 2 ? 1 : 0;
  }
}

// Stores rows of the matrix of a walk's segment through shared memory that nobody else uses. A
// warpgroup calls this.
__device__ __forceinline__ void store_matrix(const float (&rows)[64], Tile (&high)[kBoxes],
                                             Tile (&low)[kBoxes], const ChunkParams& params,
                                             const Walk& walk) {
  SegmentMatrix& matrix = effect_of(params, walk, walk.segment, walk.part()).matrix;
  Split<32> split;
#pragma unroll
  for (int i = 0; i < 32; ++i) split.set(i, rows[2 * i], rows[2 * i + 1]);
  store_rounded(high, split.high);
  store_rounded(low, split.low);
  fence_async_proxy();
  sync_warpgroup();
  if (threadIdx.x % kWarpgroupThreads != 0) return;
  store_bytes(matrix.high, high, sizeof(high));
  store_bytes(matrix.low, low, sizeof(low));
  commit_stores();
}
__device__ __forceinline__ void store_sums(const float (&sums)[64], const ChunkParams& params,
                                           const Walk& walk) {
  SegmentEffect& effect = effect_of(params, walk, walk.segment, walk.part());
  const Place place;
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    *reinterpret_cast<float2*>(effect.sums[i / 2][place.thread]) = {sums[i], sums[i + 1]};
  }
}
// After the wait for the effect's matrix.
__device__ __forceinline__ void load_sums(float (&sums)[64], const SegmentEffect& effect) {
  const Place place;
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    const float2 two = *reinterpret_cast<const float2*>(effect.sums[i / 2][place.thread]);
    sums[i] = two.x;
    sums[i + 1] = two.y;
  }
}

// Lets later segments take what a warpgroup has stored of the walk's effect.
__device__ __forceinline__ void publish_effect(const ChunkParams& params, const Walk& walk) {
  sync_warpgroup();
  if (threadIdx.x % kWarpgroupThreads != 0) return;
  publish(found_of(params, walk, walk.segment).counters);
}

// Sets the state before the walk, which is not a first segment: state = state matrix + sums for
// each segment before it. Both factors are rounded values and remainders, so that the result is
// nearly as exact as in f32. A warpgroup calls this.
template <typename Stage, int kStages>
__device__ __forceinline__ void join_effects(float (&state)[64], const ChunkParams& params,
                                             const Walk& walk, EffectRing<Stage, kStages> ring) {
  ring.full[ring.at.stage].wait(ring.at.phase);
  load_sums(state, effect_of(params, walk, 0, walk.part()));
  release(ring.empty[ring.at.stage]);
  ring.at.advance();
#pragma unroll 1
  for (int n = 1; n < walk.segment; ++n) {
    Split<16> left[kParts];
#pragma unroll
    for (int i = 0; i < 32; ++i) left[i / 16].set(i % 16, state[2 * i], state[2 * i + 1]);
    float sums[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part, ring.at.advance()) {
      ring.full[ring.at.stage].wait(ring.at.phase);
      const SegmentMatrix& matrix = ring.stages[ring.at.stage].matrix();
      products_begin();
      add_keys<bf16>(state, left[part].low, matrix.high);
      add_keys<bf16>(state, left[part].high, matrix.low);
      add_keys<bf16>(state, left[part].high, matrix.high);
      products_commit();
      if (part == 0) load_sums(sums, effect_of(params, walk, n, walk.part()));
      products_wait<0>();
      products_landed(state);
      release(ring.empty[ring.at.stage]);
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) state[i] += sums[i];
  }
}

// Sets the state before a walk with outputs.
template <bool kCut, typename Stage, int kStages>
__device__ __forceinline__ void begin_walk(float (&state)[64], const ChunkParams& params,
                                           const Walk& walk, EffectRing<Stage, kStages> ring) {
  if (kCut && walk.segment > 0) [[unlikely]] {
    join_effects(state, params, walk, ring);
  } else if (!walk.from_zero) {
    load_state(state, params.state, params.state_type, walk.state(params));
  }
}
// Stores the state behind it, in its slot or as the effect of a first segment.
template <bool kCut>
__device__ __forceinline__ void end_walk(const float (&state)[64], const ChunkParams& params,
                                         const Walk& walk) {
  if (!kCut || walk.is_last()) {
    store_state(state, params.state, params.state_type, walk.state(params));
  } else if (walk.segment == 0) {
    store_sums(state, params, walk);
    publish_effect(params, walk);
  }
}

// The other warpgroup gives the stages of effects back.
template <typename Stage, int kStages>
__device__ __forceinline__ void skip_effects(const Walk& walk, EffectRing<Stage, kStages> ring) {
#pragma unroll 1
  for (int i = stages_of_effects(walk); i > 0; --i, ring.at.advance()) {
    ring.full[ring.at.stage].wait(ring.at.phase);
    release(ring.empty[ring.at.stage]);
  }
}

}  // namespace fovea::kernels::cuda
