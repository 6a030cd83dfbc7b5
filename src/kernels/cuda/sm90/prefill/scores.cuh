// SPDX-License-Identifier: Apache-2.0
// Rows of a consumer warpgroup, and its scores of a key tile: masks, soft cap, ALiBi.
#pragma once

#include "kernels/cuda/common/log2.cuh"
#include "kernels/cuda/sm90/prefill/config.cuh"

namespace fovea::kernels::cuda {

// The compiler serialises products whose control flow may diverge within a warp: say that it does not.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }
__device__ __forceinline__ bool uniform(bool value) { return __any_sync(~0u, value); }

// What a consumer keeps of a row tile; the rest stays in its slot in shared memory.
struct RowTile {
  const TileSlot* slot;
  int block_begin;
  int last_block;  // where segments are summed: of the one at hand, as is block_begin
  int row_begin;   // of all the row tile, as is `slot`
  int ends;        // flags below
  Interval open;  // keys that every row of the warpgroup sees
  // From raw products of the thread's rows to scores: in units of log2, if general to natural ones.
  float factor[2];
};

// Whether the row tile is cut, and whether this is the first or the last segment that the block takes of it, from the
// last.
constexpr int kIsCut = 1, kOpens = 2, kCloses = 4;
template <class Config>
__device__ __forceinline__ bool opens(const RowTile& tile) {
  return !Config::kSegments || (tile.ends & kOpens);
}
template <class Config>
__device__ __forceinline__ bool closes(const RowTile& tile) {
  return !Config::kSegments || (tile.ends & kCloses);
}

// `factor` is that of all rows; rows of fp8 have their own, which scale_rows finds.
__device__ __forceinline__ RowTile row_tile(const TileSlot& slot, int consumer, float factor) {
  const RowsView& rows = slot.rows[consumer];
  return {&slot, uniform(slot.work.block_begin), 0, 0, 0,
          {uniform(rows.open_begin), uniform(rows.open_end)},
          {factor, factor}};
}

// The first key tile of a row tile is the one with its last keys.
template <class Config>
__device__ __forceinline__ int last_block(const RowTile& tile) {
  return Config::kSegments ? tile.last_block : uniform(tile.slot->work.block_end) - 1;
}

// Row of the warpgroup's 64: lane / 4 and lane / 4 + 8 of its warp's 16.
__device__ __forceinline__ int thread_row(int half) {
  return threadIdx.x % kWarpgroupThreads / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
}

// Token within the request of a row of a consumer; may lie past the request's end.
__device__ __forceinline__ int row_token(const PrefillParams& params, const WorkTile& work, int consumer,
                                         int row) {
  return work.first_token + ((consumer * kGroupRows + row) >> params.heads_shift);
}
__device__ __forceinline__ int row_head(const PrefillParams& params, const WorkTile& work, int row) {
  return work.q_head + (row & ((1 << params.heads_shift) - 1));
}

// The keys that a row sees, if no predicate is needed. Rows behind the request's end repeat its last.
__device__ __forceinline__ Interval row_keys(const PrefillParams& params, const WorkTile& work,
                                             int consumer, int row) {
  const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
  const int token = min(row_token(params, work, consumer, row), work.q_len - 1);
  return visible_keys(params.attention.batch.mask, view, token, token);
}

template <class Config>
struct Accumulators {
  float out[Config::kHeadDimV / 2];
  float scores[Config::kKeys / 2];
  uint32_t weights[Config::kKeys * Config::kBytes / 8];
  uint32_t next_weights[Config::kAlone ? Config::kKeys / 4 : 1];  // alone: those of the key tile behind
  float rescale[2];  // what out shrinks by before these are multiplied
  uint32_t queries[Config::kQueryRegisterSteps > 0 ? 4 * Config::kQueryRegisterSteps : 1];
  float base[2];  // power of two that weights are relative to
  float sum[2];   // of this thread's columns
  // fp8 caches: scales of the next key tile to weigh, and what those of values are relative to.
  Ring<Config::kScaleSlots> scales;
  float v_unit;
};

// Which keys of the key tile each of the warp's 16 rows sees, as bits in shared memory: a predicate of
// many branches once, instead of once for each of a thread's scores.
template <class Config>
__device__ __forceinline__ void find_seen(const PrefillParams& params,
                                          typename Config::SharedMemory& shared, const RowTile& tile,
                                          int consumer, int start) {
  const WorkTile& work = tile.slot->work;
  const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
  const Interval keys = row_keys(params, work, consumer, row);
  const int token = min(row_token(params, work, consumer, row), work.q_len - 1);
  __syncwarp();
#pragma unroll 1
  for (int word = lane / 16; word < (Config::kKeys + 31) / 32; word += 2) {
    uint32_t bits = 0;
#pragma unroll 1
    for (int bit = 0; bit < 32; ++bit) {
      const int key = start + word * 32 + bit;
      const bool seen = key >= keys.begin && key < keys.end &&
                        inlined_visible(params.attention.batch.mask, view, token, key);
      bits |= static_cast<uint32_t>(seen) << bit;
    }
    shared.seen[consumer][row][word] = bits;
  }
  __syncwarp();
}

// Hides keys that the rows do not see.
template <class Config>
__device__ __forceinline__ void mask_scores(const PrefillParams& params,
                                            typename Config::SharedMemory& shared, const RowTile& tile,
                                            int consumer, int block, Accumulators<Config>& acc) {
  const int start = block * Config::kKeys;
  const bool from_begin = start >= tile.open.begin;
  if constexpr (Config::kGeneral) {
    // The vote changes nothing but what the compiler knows: without it products were serialised (C7520).
    if (uniform(from_begin && start + Config::kKeys <= tile.open.end)) return;
  } else if (from_begin && start + Config::kKeys <= tile.open.end) {
    return;
  }
  const bool predicate = Config::kGeneral && needs_predicate(params.attention.batch.mask);
  if constexpr (Config::kGeneral) {
    if (predicate) {
      find_seen<Config>(params, shared, tile, consumer, start);
#pragma unroll
      for (int i = 0; i < Config::kKeys / 2; ++i) {
        const int column = i / 4 * 8 + i % 2;
        const uint32_t bits = shared.seen[consumer][thread_row(i / 2 % 2)][column / 32];
        if (!(bits >> (column % 32 + threadIdx.x % 4 * 2) & 1)) acc.scores[i] = -infinity();
      }
      return;
    }
  }
  const int column = start + threadIdx.x % 4 * 2;
  int begin[2], end[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Interval keys = row_keys(params, tile.slot->work, consumer, thread_row(half));
    begin[half] = keys.begin - column;
    end[half] = keys.end - column;
  }
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) {
    if (i / 4 * 8 + i % 2 >= end[i / 2 % 2]) acc.scores[i] = -infinity();
  }
  if (from_begin) return;
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) {
    if (i / 4 * 8 + i % 2 < begin[i / 2 % 2]) acc.scores[i] = -infinity();
  }
}

// Raw products to scores in units of log2: scale, cap, ALiBi. Plain scores are scaled in the softmax.
template <class Config>
__device__ __forceinline__ void transform_scores(const PrefillParams& params, const RowTile& tile,
                                                 int consumer, int block, Accumulators<Config>& acc) {
  if constexpr (!Config::kGeneral) return;
  const AttentionParams& attention = params.attention;
  const float cap = attention.logit_cap;
  const bool slopes = attention.alibi_slopes != nullptr;
  const float unit = slopes ? 1 : kLog2E;
  if (cap > 0) {
    const float inverse = __fdividef(1, cap);  // a division a score: twice the time (2026-11-22)
#pragma unroll
    for (int i = 0; i < Config::kKeys / 2; ++i) {
      acc.scores[i] = cap * unit * tanh_fast(acc.scores[i] * (tile.factor[i / 2 % 2] * inverse));
    }
  } else {
#pragma unroll
    for (int i = 0; i < Config::kKeys / 2; ++i) acc.scores[i] *= tile.factor[i / 2 % 2] * unit;
  }
  if (slopes) {
    const WorkTile& work = tile.slot->work;
    const RequestView view = {work.request, work.q_begin, work.q_len, work.kv_len};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = thread_row(half);
      const int token = min(row_token(params, work, consumer, row), work.q_len - 1);
      const float slope = attention.alibi_slopes[row_head(params, work, row)];
      const int position = query_position(attention.batch.mask, view, token);
#pragma unroll
      for (int j = 0; j < Config::kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = block * Config::kKeys + 8 * j + threadIdx.x % 4 * 2 + i;
          const int at = key_position(attention.batch.mask, view, key);
          float& score = acc.scores[4 * j + 2 * half + i];
          score = (score + slope * static_cast<float>(at - position)) * kLog2E;
        }
      }
    }
  }
}

}  // namespace fovea::kernels::cuda
