// SPDX-License-Identifier: Apache-2.0
// One consumer warpgroup: 64 query rows over the key tiles of its row tile, from the last key to the
// first. A step computes the scores of the next key tile while the values of the current one are added;
// the step that ends a row tile already computes the first scores of the next row tile.
#pragma once

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/prefill_rows/config.cuh"
#include "kernels/cuda/sm90/prefill_rows/fp8.cuh"

namespace fovea::kernels::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// The compiler serialises products whose control flow may diverge within a warp: say that it does not.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }
__device__ __forceinline__ bool uniform(bool value) { return __any_sync(~0u, value); }

// What a consumer keeps of a row tile; the rest stays in its slot in shared memory.
struct RowTile {
  const TileSlot* slot;
  int block_begin, block_end;
  Interval open;  // keys that every row of the warp sees
  int columns;    // keys of the first key tile that some row of the warpgroup can see, rounded up
  float scale[2];  // fp8 caches: from a raw score of the thread's rows to a scaled one
};

// Row of the warpgroup's 64: lane / 4 and lane / 4 + 8 of its warp's 16.
__device__ __forceinline__ int thread_row(int half) {
  return threadIdx.x % kWarpgroupThreads / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
}

// Token within the request of a row of a consumer; may lie past the request's end.
__device__ __forceinline__ int row_token(const PrefillParams& params, const TileSlot& slot, int consumer,
                                         int row) {
  return slot.first_token + ((consumer * kGroupRows + row) >> params.heads_shift);
}
__device__ __forceinline__ int row_head(const PrefillParams& params, const TileSlot& slot, int row) {
  return slot.q_head + (row & ((1 << params.heads_shift) - 1));
}

template <class Config>
__device__ __forceinline__ RowTile row_tile(const PrefillParams& params,
                                            typename Config::SharedMemory& shared,
                                            const TileSlot& slot, int consumer) {
  RowTile tile;
  tile.slot = &slot;
  tile.block_begin = uniform(slot.block_begin);
  tile.block_end = uniform(slot.block_end);
  const MaskParams& mask = params.attention.batch.mask;
  const RequestView view = {slot.request, slot.q_begin, slot.q_len, slot.kv_len};
  // Every warp keeps the intervals of its own 16 rows.
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
  const int token = min(row_token(params, slot, consumer, row), slot.q_len - 1);
  const Interval keys = visible_keys(mask, view, token, token);
  __syncwarp();
  if (lane < 16) shared.visible[consumer][row] = keys;
  __syncwarp();
  // Both ends grow with the token.
  tile.open.begin = __shfl_sync(~0u, keys.begin, 15);
  tile.open.end = __shfl_sync(~0u, keys.end, 0);
  if (Config::kGeneral && needs_predicate(mask)) tile.open = {0, 0};
  const int last = min(row_token(params, slot, consumer, kGroupRows - 1), slot.q_len - 1);
  const int end = visible_keys(mask, view, last, last).end;
  const int start = (slot.block_end - 1) * Config::kKeys;
  const int seen = max((end - start + Config::kGrain - 1) / Config::kGrain, 1) * Config::kGrain;
  tile.columns = uniform(min(seen, Config::kKeys));
  if constexpr (Config::kFp8) {
    const KeyParams& k = params.attention.keys;
    const float scale = params.attention.scale * shared_scale(k, k.k_scale, slot.kv_head);
    for (int half = 0; half < 2; ++half) {
      const int row = thread_row(half);
      tile.scale[half] = scale;
      if (Config::kMath != Config::kQ) tile.scale[half] *= shared.q_unit[consumer][row];
      if (Config::kNarrow) {
        const int token = min(row_token(params, slot, consumer, row), slot.q_len - 1);
        tile.scale[half] *= query_scale(params, slot.q_begin + token, row_head(params, slot, row));
      }
    }
  }
  return tile;
}

template <class Config>
struct Accumulators {
  float out[Config::kHeadDimV / 2];
  float scores[Config::kKeys / 2];
  uint32_t weights[Config::kKeys * Config::kBytes / 8];
  uint32_t queries[Config::kQueryRegisters ? Config::kHeadDim * Config::kBytes / 8 : 1];
  float most[2];     // score that weights are relative to, unscaled
  float sum[2];      // of this thread's columns
  float rescale[2];  // what out still has to shrink by,
  bool grown;        // if some row of the warp has to
  // fp8 caches: scales of the next key tile to weigh, and what those of values are relative to.
  Ring<Config::kScaleSlots> scales;
  float v_unit = 1;
};

template <class Config>
__device__ __forceinline__ void load_queries(typename Config::SharedMemory& shared, int consumer,
                                             int stage, Accumulators<Config>& acc) {
  narrow_queries<Config>(shared, consumer, stage);
  if constexpr (Config::kQueryRegisters) {
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < Config::kHeadDim * Config::kBytes / 32; ++step) {
      const int chunk = (step % 4 * 2 + lane / 16) ^ (row % 8);
      uint32_t(&to)[4] = reinterpret_cast<uint32_t(&)[4]>(acc.queries[4 * step]);
      load_matrices(to, &shared.q[stage][consumer][step / 4][row][chunk * 8]);
    }
    if (lane == 0) shared.q_empty[stage][consumer].arrive();
  }
}

// Rows that copies of threads brought are made visible to the tensor cores by who reads them.
template <class Config>
__device__ __forceinline__ void await_keys(TransactionBarrier& full, uint32_t phase) {
  full.wait(phase);
  if constexpr (Config::kRows && !Config::kWiden) fence_async_proxy();
}

// Starts scores = q * K^T.
template <class Config>
__device__ __forceinline__ void start_scores(const typename Config::SharedMemory& shared, int consumer,
                                             int q_stage, int stage, Accumulators<Config>& acc) {
  const uint64_t k = rows_descriptor(shared_address(shared.k[stage]));
  // Opaque: else the compiler keeps the descriptors of all steps in registers, 32 of them for head dim 256.
  uint32_t q_address = shared_address(shared.q[q_stage][consumer]);
  asm volatile("" : "+r"(q_address));
  const uint64_t q = rows_descriptor(q_address);
#pragma unroll
  for (int step = 0; step < Config::kHeadDim * Config::kBytes / 32; ++step) {
    const uint64_t k_step = moved(k, step / 4 * sizeof(shared.k[0][0]) + step % 4 * 32);
    if constexpr (Config::kQueryRegisters) {
      Product<Config::kKeys>::template run<Config::kMath, false>(
          acc.scores, &acc.queries[4 * step], k_step, step > 0);
    } else {
      const uint64_t q_step = moved(q, step / 4 * sizeof(shared.q[0][0][0]) + step % 4 * 32);
      Product<Config::kKeys>::template run<Config::kMath, false>(acc.scores, q_step, k_step,
                                                         step > 0);
    }
  }
}

// Starts out (+)= weights * V over keys [kFirst, kEnd) of the tile.
template <class Config, int kFirst, int kEnd>
__device__ __forceinline__ void start_values(const typename Config::SharedMemory& shared, int stage,
                                             bool add, Accumulators<Config>& acc) {
  if constexpr (Config::kNarrow) {
    const uint64_t v = rows_descriptor(shared_address(shared.v[stage]));
#pragma unroll
    for (int key = kFirst; key < kEnd; key += 32) {
      Product<Config::kHeadDimV>::template run<Config::kMath, false>(
          acc.out, &acc.weights[key / 8],
          moved(v, key / kSwizzledBytes * sizeof(shared.v[0][0]) + key % kSwizzledBytes),
          add || key > kFirst);
    }
  } else {
    const uint64_t v =
        columns_descriptor(shared_address(shared.v[stage]), sizeof(shared.v[0][0]));
#pragma unroll
    for (int key = kFirst; key < kEnd; key += 16) {
      Product<Config::kHeadDimV>::template run<Config::kMath, true>(
          acc.out, &acc.weights[key / 4], moved(v, key * 128), add || key > kFirst);
    }
  }
}

template <class Config, int kFrom = 0>
__device__ __forceinline__ void start_first_values(const typename Config::SharedMemory& shared,
                                                   int stage, int columns,
                                                   Accumulators<Config>& acc) {
  if constexpr (kFrom < Config::kKeys) {
    if (kFrom == 0 || uniform(columns > kFrom)) {
      start_values<Config, kFrom, kFrom + Config::kGrain>(shared, stage, kFrom > 0, acc);
      start_first_values<Config, kFrom + Config::kGrain>(shared, stage, columns, acc);
    }
  }
}

// Which keys of the key tile each of the warp's 16 rows sees, as bits in shared memory: a predicate of
// many branches once, instead of once for each of a thread's scores.
template <class Config>
__device__ __forceinline__ void find_seen(const PrefillParams& params,
                                          typename Config::SharedMemory& shared, const RowTile& tile,
                                          int consumer, int start) {
  const TileSlot& slot = *tile.slot;
  const RequestView view = {slot.request, slot.q_begin, slot.q_len, slot.kv_len};
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
  const Interval keys = shared.visible[consumer][row];
  const int token = min(row_token(params, slot, consumer, row), slot.q_len - 1);
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
  if (start >= tile.open.begin && start + Config::kKeys <= tile.open.end) return;
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
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Interval keys = shared.visible[consumer][thread_row(half)];
    const int begin = keys.begin - column;
    const int end = keys.end - column;
#pragma unroll
    for (int j = 0; j < Config::kKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = acc.scores[4 * j + 2 * half + i];
        if (8 * j + i < begin || 8 * j + i >= end) score = -infinity();
      }
    }
  }
}

// What scales a raw product of the thread's row.
template <class Config>
__device__ __forceinline__ float row_scale(const PrefillParams& params, const RowTile& tile, int half) {
  return Config::kFp8 ? tile.scale[half] : params.attention.scale;
}

// Raw products to scores in units of log2: scale, cap, ALiBi. Plain scores are scaled in the softmax.
template <class Config>
__device__ __forceinline__ void transform_scores(const PrefillParams& params, const RowTile& tile,
                                                 int consumer, int block, Accumulators<Config>& acc) {
  if constexpr (!Config::kGeneral) return;
  const AttentionParams& attention = params.attention;
  const float cap = attention.logit_cap;
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) {
    acc.scores[i] *= row_scale<Config>(params, tile, i / 2 % 2);
  }
  if (cap > 0) {
#pragma unroll
    for (int i = 0; i < Config::kKeys / 2; ++i) {
      acc.scores[i] = cap * tanh_fast(acc.scores[i] / cap);
    }
  }
  if (attention.alibi_slopes) {
    const TileSlot& slot = *tile.slot;
    const RequestView view = {slot.request, slot.q_begin, slot.q_len, slot.kv_len};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = thread_row(half);
      const int token = min(row_token(params, slot, consumer, row), slot.q_len - 1);
      const float slope = attention.alibi_slopes[row_head(params, slot, row)];
      const int position = query_position(attention.batch.mask, view, token);
#pragma unroll
      for (int j = 0; j < Config::kKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = block * Config::kKeys + 8 * j + threadIdx.x % 4 * 2 + i;
          const int at = key_position(attention.batch.mask, view, key);
          acc.scores[4 * j + 2 * half + i] += slope * static_cast<float>(at - position);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) acc.scores[i] *= kLog2E;
}

// What the softmax multiplies scores with.
template <class Config>
__device__ __forceinline__ float score_factor(const PrefillParams& params, const RowTile& tile,
                                              int half) {
  return Config::kGeneral ? 1.0f : row_scale<Config>(params, tile, half) * kLog2E;
}

// Scores to weights, in place; factor: of the thread's rows. kFirst: nothing came before.
template <class Config, bool kFirst>
__device__ __forceinline__ void softmax(const float (&factor)[2], Accumulators<Config>& acc) {
  float base[2];
  bool grown = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = fmaxf(acc.scores[2 * half], acc.scores[2 * half + 1]);
#pragma unroll
    for (int j = 1; j < Config::kKeys / 8; ++j) {
      most = fmaxf(most, fmaxf(acc.scores[4 * j + 2 * half], acc.scores[4 * j + 2 * half + 1]));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    if constexpr (kFirst) {
      acc.most[half] = most;
    } else {
      // Of a row that has seen nothing the reference is -inf, and inf > kSlack.
      const bool own = (most - acc.most[half]) * factor[half] > Config::kSlack;
      acc.rescale[half] = own ? exp2_fast((acc.most[half] - most) * factor[half]) : 1.0f;
      acc.most[half] = own ? most : acc.most[half];
      grown |= own;
    }
    // No -inf - -inf.
    base[half] = acc.most[half] == -infinity() ? 0.0f
                                               : acc.most[half] * factor[half] - Config::kBias;
  }
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) {
    const int at = i / (Config::kKeys / 4) * 2 + i % (Config::kKeys / 4) / 2 * 4 + i % 2;
    acc.scores[at] = exp2_fast(acc.scores[at] * factor[at / 2 % 2] - base[at / 2 % 2]);
  }
  // Sums only after all powers: an addition right behind its power would wait for it, 64 times.
  float total[2][2] = {};
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) total[i / 2 % 2][i % 2] += acc.scores[i];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = total[half][0] + total[half][1];
    acc.sum[half] = kFirst ? sum : acc.sum[half] * acc.rescale[half] + sum;
  }
  acc.grown = uniform(grown);
}

template <class Config>
__device__ __forceinline__ void rescale_out(Accumulators<Config>& acc) {
  if (!acc.grown) return;
#pragma unroll
  for (int i = 0; i < Config::kHeadDimV / 2; ++i) acc.out[i] *= acc.rescale[i / 2 % 2];
}

template <class Config>
__device__ __forceinline__ void pack_weights(Accumulators<Config>& acc) {
  if constexpr (Config::kNarrow) {
    pack_e4m3_weights<Config::kKeys>(acc.scores, acc.weights);
  } else {
#pragma unroll
    for (int i = 0; i < Config::kKeys / 4; ++i) {
      acc.weights[i] = pack<Config::kMath>(acc.scores[2 * i], acc.scores[2 * i + 1]);
    }
  }
}

// Values of keys that are not the request's, or that have left its window, may be anything, even NaN, and
// 0 * NaN is NaN. Each warpgroup clears rows [from, to) of the key tile for itself; two that do it at once
// write the same zeros.
template <class Config>
__device__ __forceinline__ void clear_values(typename Config::SharedMemory& shared, int stage, int from,
                                             int to, int consumer) {
  if (Config::kRows || Config::kNarrow || from >= to) return;  // they come as zeros
  constexpr int kChunks = kSwizzledColumns / 8;
  for (int i = threadIdx.x % kWarpgroupThreads; i < (to - from) * kChunks; i += kWarpgroupThreads) {
#pragma unroll
    for (int c = 0; c < Config::kDimVBlocks; ++c) {
      *reinterpret_cast<uint4*>(&shared.v[stage][c][from + i / kChunks][i % kChunks * 8]) = {};
    }
  }
  fence_async_proxy();
  named_barrier_wait(8 + consumer, kWarpgroupThreads);
}

// Of the first key tile of a row tile, the one with its last keys; `used` of its keys are multiplied.
template <class Config>
__device__ __forceinline__ void clear_last_keys(typename Config::SharedMemory& shared, int stage,
                                                const RowTile& tile, int used, int consumer) {
  const int first = tile.slot->kv_len - (tile.block_end - 1) * Config::kKeys;
  clear_values<Config>(shared, stage, max(first, 0), used, consumer);
}

template <class Config>
__device__ __forceinline__ void clear_first_keys(typename Config::SharedMemory& shared, int stage,
                                                 const RowTile& tile, int consumer) {
  const int end = tile.slot->key_begin - tile.block_begin * Config::kKeys;
  clear_values<Config>(shared, stage, 0, min(end, Config::kKeys), consumer);
}

}  // namespace fovea::kernels::cuda
