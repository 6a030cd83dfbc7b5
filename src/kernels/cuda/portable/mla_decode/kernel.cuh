// SPDX-License-Identifier: Apache-2.0
// Absorbed MLA decode for any NVIDIA GPU from sm_80 on. A block of eight warps works through its
// range of the planned list; an item is 16, 32 or 64 rows of packed (token, head) pairs against a
// range of keys. Keys are copied once: their first columns are the values.
//
//   copies    | tile t + 2, t + 3 ...                                          (cp.async)
//   products  | scores t + 1, values t |            | scores t + 2, values t + 1 |
//   softmax                            | tile t + 1 |                            | tile t + 2
//                                      ^ barriers   ^                            ^
//
// Queries stay in registers; each warp holds a quarter of their columns.
#pragma once

#include "kernels/cuda/portable/mla_decode/epilogue.cuh"

namespace fovea::kernels::cuda {

template <class C>
__device__ void run_item(const PortableMlaParams& params, int index, float cache_scale,
                         typename C::SharedMemory& shared) {
  MlaItem item = params.work.items[index];
  item.key_begin = first_tile_key<C>(params, item);
  const bool scaled_keys = C::kFp8 && params.cache_scale_stride != 0;
  KeyLoader<C> loader(params, shared, item);
  Queries<C> queries;
  load_queries<C>(params, item, queries);
  SoftmaxRow row = softmax_row<C>(params, item);
  Values<C> values;
  const float factor = params.scale * cache_scale * kLog2E;
  const int tiles = max(item.key_end - item.key_begin + C::kKeys - 1, 0) / C::kKeys;
  loader.prepare(0);
  __syncthreads();
  for (int t = -1; t < tiles; ++t) {
    const int next = t + 1;
    if (next < tiles) score_tile<C>(shared, next % C::kTiles, queries);
    if (t >= 0) add_values<C>(shared, t % C::kTiles, values);
    __syncthreads();
    loader.prepare(t + 2);
    if (next < tiles) {
      softmax_tile<C>(shared, factor, scaled_keys, next, item.key_begin + next * C::kKeys, row);
    }
    __syncthreads();
  }
  const MlaItem done = params.work.items[index];  // read again, since registers are short
  const float value_scale = C::kScaled    ? 1 / kKeyFactor
                            : scaled_keys ? 1 / kScaleUnit
                                          : cache_scale;
  finish_row<C>(params, done, value_scale, row, shared);
  __syncthreads();
  store_values<C>(params, done, values, shared);
}

template <int kLatent, int kRotary, Type kQuery, Keys kCache, int kRowTile>
__device__ void MlaDecodeConfig<kLatent, kRotary, kQuery, kCache, kRowTile>::run(
    const PortableMlaParams& params) {
  extern __shared__ __align__(128) char dynamic_shared[];
  auto& shared = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  wait_for_previous_kernel();
  allow_next_kernel();
  const bool one_scale =
      kFp8 && !kScaled && params.cache_scale != nullptr && params.cache_scale_stride == 0;
  const float cache_scale = one_scale ? *params.cache_scale : 1.0f;
  const MlaRange range = params.work.ranges[blockIdx.x];
  for (int i = range.begin; i < range.end; i += range.step) {
    run_item<MlaDecodeConfig>(params, i, cache_scale, shared);
  }
}

template <int kLatent, int kRotary, Type kQuery, Keys kCache, int kRowTile>
using Config = MlaDecodeConfig<kLatent, kRotary, kQuery, kCache, kRowTile>;

}  // namespace fovea::kernels::cuda
