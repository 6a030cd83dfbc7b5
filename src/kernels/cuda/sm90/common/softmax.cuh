// SPDX-License-Identifier: Apache-2.0
// From the scores of a key tile to weights, the left operand of products with V.
#pragma once

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/common/fp8.cuh"
#include "kernels/cuda/sm90/common/hide_keys.cuh"
#include "kernels/cuda/sm90/common/transform.cuh"

namespace fovea::kernels::cuda {

// Weights of a row are relative to 2^-kBias of its largest score in its first key tile. The row
// keeps this base while a thread's weights of a key tile add up to at most kMaxSum, so that most
// key tiles need no maximum. f16 and e4m3 weights stay finite.
template <class Config>
constexpr float kBias = Config::kNarrow ? 3 : 0;
template <class Config>
constexpr float kMaxSum = Config::kNarrow ? 448 : 4096;
// Sums lag behind weights, so that additions need not wait for powers.
template <class Config>
constexpr bool kWeighsAhead = Config::kConsumers == 3 && !Config::kNarrow;
// Values are still being multiplied into out when a row is found to have outgrown its base.
template <class Config>
constexpr bool kShrinksLater = Config::kAlone || Config::kInPlace;

// Returns the base for the largest of the row's scaled scores of the key tile, but at least
// `before`.
template <class Config>
__device__ __forceinline__ float largest_base(int half, float before, float factor,
                                              const Accumulators<Config>& acc) {
  float most = -infinity();
#pragma unroll
  for (int j = 0; j < Config::kKeys / 8; ++j) {
    most = fmaxf(most, fmaxf(acc.scores[4 * j + 2 * half], acc.scores[4 * j + 2 * half + 1]));
  }
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  return fmaxf(before, most * factor - kBias<Config>);
}

template <class Config>
__device__ __forceinline__ float first_base(const RowTile& tile, int half,
                                            const Accumulators<Config>& acc) {
  if (Config::kCaps && uniform(tile.bounded)) return 0;
  if constexpr (Config::kExponents) {  // 0 if nothing is seen, so that the next exponents are the
                                       // scores
    const float base = largest_base<Config>(half, -infinity(), tile.factor[half], acc);
    return base > -infinity() ? base : 0;
  }
  return largest_base<Config>(half, kNothing, tile.factor[half], acc);
}

// Returns whether a row's weights have outgrown its base. `sum` is that of one thread.
template <class Config>
__device__ __forceinline__ bool has_outgrown(const RowTile& tile, float sum) {
  return !(sum <= kMaxSum<Config>)&&!(Config::kCaps && tile.bounded);
}

// Finds the bases of a row tile from its first key tile.
template <class Config>
__device__ __forceinline__ void find_bases(const RowTile& tile, Accumulators<Config>& acc) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    acc.base[half] = first_base<Config>(tile, half, acc);
  }
}

// Replaces the scores of a row tile's first key tile by weights. Calls under(step) for steps 0 to 7
// between the powers.
template <class Config, typename Under>
__device__ __forceinline__ void first_weights_of(const RowTile& tile, Accumulators<Config>& acc,
                                                 Under under) {
  const float factor[2] = {tile.factor[0], tile.factor[1]};
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) {
    const int at = i / (Config::kKeys / 4) * 2 + i % (Config::kKeys / 4) / 2 * 4 + i % 2;
    acc.scores[at] =
        exp2_fast(__fmaf_rn(acc.scores[at], factor[at / 2 % 2], -acc.base[at / 2 % 2]));
    if ((i + 1) % (Config::kKeys / 16) == 0) under(i / (Config::kKeys / 16));
  }
  // Sums come after all powers: an addition right after its power would wait for it.
  float total[2][2] = {};
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) total[i / 2 % 2][i % 2] += acc.scores[i];
#pragma unroll
  for (int half = 0; half < 2; ++half) acc.sum[half] = total[half][0] + total[half][1];
}

// Replaces the scores of a row tile's first key tile by weights relative to the row's largest.
template <class Config>
__device__ __forceinline__ void first_softmax(const RowTile& tile, Accumulators<Config>& acc) {
  const float factor[2] = {tile.factor[0], tile.factor[1]};
  if constexpr (Config::kStoresApart) {
    find_bases<Config>(tile, acc);
  } else {  // the same, in a form that changes no other variant's machine code
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      acc.base[half] = first_base<Config>(tile, half, acc);
    }
  }
  first_weights_of<Config>(tile, acc, [](int) {});
}

// Returns whether any of the four threads of a row passes true. A vote of the warp would make the
// bits of a row depend on its neighbours.
__device__ __forceinline__ bool row_votes(bool value) {
  const uint32_t row = 0xfu << (threadIdx.x % 32 & ~3);
  return (__ballot_sync(~0u, value) & row) != 0;
}

template <class Config>
__device__ __forceinline__ void shrink_out(const float (&factor)[2], Accumulators<Config>& acc) {
#pragma unroll
  for (int i = 0; i < Config::kHeadDimV / 2; ++i) acc.out[i] *= factor[i / 2 % 2];
}

// Gives rows that have outgrown their base that of the largest score so far; what was accumulated
// shrinks.
template <class Config>
__device__ __forceinline__ void raise_bases(const float (&factor)[2], const bool (&outgrown)[2],
                                            Accumulators<Config>& acc) {
  float rescale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool raised = row_votes(outgrown[half]);
    const float base = largest_base<Config>(half, acc.base[half], factor[half], acc);
    rescale[half] = raised ? exp2_fast(acc.base[half] - base) : 1.0f;
    if (raised) acc.base[half] = base;
    // Rounded and not contracted with the addition that follows: the same bits wherever that
    // stands.
    acc.sum[half] =
        Config::kSegments ? __fmul_rn(acc.sum[half], rescale[half]) : acc.sum[half] * rescale[half];
    if constexpr (kShrinksLater<Config>) acc.rescale[half] = rescale[half];
  }
  if constexpr (!kShrinksLater<Config>) shrink_out<Config>(rescale, acc);
}

// Packs two weights of a row for the products. e4m3 weights are packed with the two before, those
// of 8 keys less.
template <class Config>
__device__ __forceinline__ void pack_pair(int i, const float (&weight)[2], float (&held)[2][2],
                                          Accumulators<Config>& acc) {
  if constexpr (!Config::kNarrow) {
    (Config::kAlone ? acc.next_weights : acc.weights)[i] =
        pack_here<Config::kMath>(weight[0], weight[1]);
  } else if (i % 4 < 2) {
    held[i % 2][0] = weight[0];
    held[i % 2][1] = weight[1];
  } else {
    acc.weights[i / 4 * 2 + i % 2] =
        pack_e4m3(held[i % 2][0], held[i % 2][1], weight[0], weight[1]);
  }
}

// Packs weights and leaves the scores. Each 16 weights are found before the 16 before them are
// summed (chosen for head dim 64 on H200, 2026-11-22).
template <class Config>
__device__ __forceinline__ void weigh_ahead(const float (&factor)[2], float (&total)[2][2],
                                            Accumulators<Config>& acc) {
  constexpr int kAhead = 16;
  float weights[2][kAhead];
  const auto sum_and_pack = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < kAhead / 2; ++i) {
      const float(&of)[kAhead] = weights[chunk % 2];
      total[i % 2][0] += of[2 * i];
      total[i % 2][1] += of[2 * i + 1];
      acc.weights[chunk * kAhead / 2 + i] = pack_here<Config::kMath>(of[2 * i], of[2 * i + 1]);
    }
  };
  constexpr int kChunks = Config::kKeys / 2 / kAhead;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int half = i / 2 % 2;
      const float score = acc.scores[chunk * kAhead + i];
      weights[chunk % 2][i] = exp2_fast(__fmaf_rn(score, factor[half], -acc.base[half]));
    }
    if (chunk > 0) sum_and_pack(chunk - 1);
  }
  sum_and_pack(kChunks - 1);
}

// As softmax(), for inner scores that are still to be capped: rows keep their base.
template <class Config, int kHalves>
__device__ __forceinline__ void softmax_of_capped(const PrefillParams& params,
                                                  Accumulators<Config>& acc) {
  float total[2][2] = {};
  float held[2][2];
  for_each_near<Config>(params, acc, [&](int first, const float(&scores)[kAtOnce]) {
#pragma unroll
    for (int pair = 0; pair < kAtOnce / 2; ++pair) {
      const int i = first / 2 + pair;
      if (pair % 2 >= kHalves) {
        acc.next_weights[i] = 0;
        continue;
      }
      float weight[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        weight[j] = exp2_fast(scores[2 * pair + j]);
        total[pair % 2][j] += weight[j];
      }
      pack_pair<Config>(i, weight, held, acc);
    }
  });
#pragma unroll
  for (int half = 0; half < kHalves; ++half) acc.sum[half] += total[half][0] + total[half][1];
}

// Packs the weights of a later key tile and leaves its scores; out has landed. kHalves: the first
// of the thread's rows, or both. `inner`: scores are still to be capped.
template <class Config, int kHalves>
__device__ __forceinline__ void softmax(const PrefillParams& params, const RowTile& tile,
                                        bool inner, Accumulators<Config>& acc) {
  const float factor[2] = {tile.factor[0], tile.factor[1]};
  if constexpr (Config::kAlone) acc.rescale[0] = acc.rescale[1] = 1;
  if (Config::kCaps && inner) {
    softmax_of_capped<Config, kHalves>(params, acc);
    return;
  }
#pragma unroll 1
  for (bool raised = false;; raised = true) {
    float total[2][2] = {};
    float held[2][2];
    if constexpr (kWeighsAhead<Config>) weigh_ahead<Config>(factor, total, acc);
#pragma unroll
    for (int i = 0; i < (kWeighsAhead<Config> ? 0 : Config::kKeys / 4); ++i) {
      if (i % 2 >= kHalves) {
        acc.next_weights[i] = 0;
        continue;
      }
      float weight[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        weight[j] = exp2_fast(__fmaf_rn(acc.scores[2 * i + j], factor[i % 2], -acc.base[i % 2]));
        total[i % 2][j] += weight[j];
      }
      pack_pair<Config>(i, weight, held, acc);
    }
    float sum[2];
    bool outgrown[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = total[half][0] + total[half][1];
      outgrown[half] = half < kHalves && has_outgrown<Config>(tile, sum[half]);
    }
    if (raised || !uniform(outgrown[0] || outgrown[1])) {
#pragma unroll
      for (int half = 0; half < 2; ++half) acc.sum[half] += sum[half];
      return;
    }
    raise_bases<Config>(factor, outgrown, acc);
  }
}

// Does what softmax() left to do, when the values of the weights before have landed.
template <class Config>
__device__ __forceinline__ void take_next_weights(Accumulators<Config>& acc) {
  if (uniform(acc.rescale[0] != 1 || acc.rescale[1] != 1)) shrink_out<Config>(acc.rescale, acc);
  // Reads both: otherwise the compiler puts both into the same registers and serialises the
  // products (C7513).
  const int keep = uniform(0x3210);
#pragma unroll
  for (int i = 0; i < Config::kKeys / 4; ++i) {
    acc.weights[i] = __byte_perm(acc.next_weights[i], acc.weights[i], keep);
  }
}

// Returns the scales of the key tile to weigh: those of K, then of V.
template <class Config>
__device__ __forceinline__ const auto& tile_scales(const typename Config::SharedMemory& shared,
                                                   const Accumulators<Config>& acc) {
  if constexpr (Config::kWiden) {
    return shared.scales[acc.fp8.scales.stage];
  } else {
    return shared;  // not used
  }
}

// Multiplies packed weights by the scales of their values, unless the values have been multiplied.
template <class Config>
__device__ __forceinline__ void scale_values(const typename Config::SharedMemory& shared,
                                             const float* scales, Accumulators<Config>& acc) {
  const float unit = tile_unit<Config>(shared, acc.fp8.scales.stage, acc.fp8.v_unit);
  const float factor = acc.fp8.v_unit / unit;
  if (unit != acc.fp8.v_unit) shrink_out<Config>({factor, factor}, acc);
  acc.fp8.v_unit = unit;
  if constexpr (!Config::kWidensApart) {
    scale_packed<Config>(scales, unit, acc.weights);
  }
}

// Turns landed scores of a key tile into weights: in place for a row tile's first one, packed for
// the others.
template <class Config, bool kFirst>
__device__ __forceinline__ void weigh_scores(const PrefillParams& params,
                                             typename Config::SharedMemory& shared,
                                             const RowTile& tile, int consumer, int block,
                                             Accumulators<Config>& acc) {
  [[maybe_unused]] const auto& scales = tile_scales<Config>(shared, acc);
  const bool scaled = Config::kWiden && keys_have_scales(params);
  if constexpr (Config::kWiden) {
    if (scaled) scale_keys<Config>(scales[0], acc.scores);
  }
  const bool inner = transform_scores<Config, !kFirst>(params, tile, consumer, block, acc);
  mask_scores<Config>(params, shared, tile, consumer, block, acc);
  release_mask<Config>(params, shared, tile, consumer, block, acc);
  if constexpr (kFirst) {
    first_softmax<Config>(tile, acc);
    if constexpr (Config::kWiden) {
      if (scaled) acc.fp8.v_unit = tile_unit<Config>(shared, acc.fp8.scales.stage, 0);
    }
  } else {
    if (Config::kAlone && uniform(tile.slot->work.q_len << params.heads_shift <= 8)) {
      softmax<Config, 1>(params, tile, inner, acc);
    } else {
      softmax<Config, 2>(params, tile, inner, acc);
    }
    if constexpr (Config::kWiden) {
      if (scaled) scale_values<Config>(shared, scales[1], acc);
    }
  }
  if constexpr (Config::kWiden) acc.fp8.scales.advance();
}

// Packs the weights of a row tile's first key tile.
template <class Config>
__device__ __forceinline__ void pack_weights(const PrefillParams& params,
                                             const typename Config::SharedMemory& shared,
                                             Accumulators<Config>& acc) {
  if constexpr (Config::kNarrow) {
    pack_e4m3_weights<Config::kKeys>(acc.scores, acc.weights);
  } else {
#pragma unroll
    for (int i = 0; i < Config::kKeys / 4; ++i) {
      acc.weights[i] = pack<Config::kMath>(acc.scores[2 * i], acc.scores[2 * i + 1]);
    }
  }
  if constexpr (Config::kWiden) {
    if (!Config::kWidensApart && keys_have_scales(params)) {
      scale_packed<Config>(shared.scales[acc.fp8.scales.previous().stage][1], acc.fp8.v_unit,
                           acc.weights);
    }
  }
}

}  // namespace fovea::kernels::cuda
