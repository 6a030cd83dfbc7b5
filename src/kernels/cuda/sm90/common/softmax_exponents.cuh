// SPDX-License-Identifier: Apache-2.0
// The softmax of a key tile in two halves. Scores become exponents in place while the values of the
// previous key tile are still being multiplied, and weights when these have landed. Exponents stay,
// so that a base may rise later: the check comes before the next turn, when its result is long
// known.
#pragma once

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/common/softmax.cuh"

namespace fovea::kernels::cuda {

// Returns whether all rows of the consumer see all of the key tile and have seen keys before: their
// exponents stay as they are unless they have outgrown their base.
template <class Config>
__device__ __forceinline__ bool is_plain(const RowTile& tile, int block) {
  return static_cast<unsigned>(block - tile.first_plain) < static_cast<unsigned>(tile.plain_blocks);
}

template <class Config>
__device__ __forceinline__ void find_exponents(const RowTile& tile, Accumulators<Config>& acc) {
#pragma unroll
  for (int i = 0; i < Config::kKeys / 2; ++i) {
    const int half = i / 2 % 2;
    acc.scores[i] = __fmaf_rn(acc.scores[i], tile.factor[half], -acc.base[half]);
  }
}

// Raises the bases of `rows` by their largest exponents; those of rows that have seen nothing yet
// may fall.
template <class Config>
__device__ __forceinline__ void move_bases(const bool (&rows)[2], Accumulators<Config>& acc) {
  float rescale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool seen = row_votes(acc.sum[half] > 0);
    const float rise = largest_base<Config>(half, -infinity(), 1, acc);
    const bool moved = rows[half] && rise > (seen ? 0 : -infinity());
    rescale[half] = moved && seen ? exp2_fast(-rise) : 1.0f;
    acc.sum[half] *= rescale[half];
    acc.base[half] += moved ? rise : 0;
#pragma unroll
    for (int j = 0; j < Config::kKeys / 8; ++j) {
      acc.scores[4 * j + 2 * half] -= moved ? rise : 0;
      acc.scores[4 * j + 2 * half + 1] -= moved ? rise : 0;
    }
  }
  products_wait<0>();
  products_landed(acc.out);
  shrink_out<Config>(rescale, acc);
}

// Packs the weights of exponents and finds their sums.
template <class Config>
__device__ __forceinline__ void weigh_exponents(Accumulators<Config>& acc) {
  float total[2][2] = {};
  float held[2][2];
#pragma unroll
  for (int i = 0; i < Config::kKeys / 4; ++i) {
    const float weight[2] = {exp2_fast(acc.scores[2 * i]), exp2_fast(acc.scores[2 * i + 1])};
    total[i % 2][0] += weight[0];
    total[i % 2][1] += weight[1];
    pack_pair<Config>(i, weight, held, acc);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) acc.added[half] = total[half][0] + total[half][1];
}

// Adds the sums of the last weights. Weights of rows that have outgrown their base are made again.
template <class Config>
__device__ __forceinline__ void add_weights(const RowTile& tile, Accumulators<Config>& acc) {
  const bool outgrown[2] = {has_outgrown<Config>(tile, acc.added[0]),
                            has_outgrown<Config>(tile, acc.added[1])};
  if (uniform(outgrown[0] || outgrown[1])) [[unlikely]] {
    move_bases<Config>({row_votes(outgrown[0]), row_votes(outgrown[1])}, acc);
    weigh_exponents<Config>(acc);
  }
  acc.sum[0] += acc.added[0];
  acc.sum[1] += acc.added[1];
}

}  // namespace fovea::kernels::cuda
