// SPDX-License-Identifier: Apache-2.0
// Shapes that the Hopper MLA decode kernels share: key tiles in shared memory and where
// queries are kept.
#pragma once

#include "kernels/cuda/common/hopper.cuh"
#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/release.cuh"
#include "kernels/cuda/common/ring.cuh"
#include "kernels/cuda/common/types.cuh"

namespace fovea::kernels::cuda {

constexpr int kTileKeys = 64;     // keys of one step
constexpr int kTileColumns = 64;  // 16-bit columns of a 128-byte swizzled row
constexpr int kTileBytes = kTileKeys * kTileColumns * 2;
// A key tile is stored in groups of 8 keys; a group holds all its column tiles one after the other.
// So any page of at least 8 keys is one box of the copy engine.
constexpr int kGroupKeys = 8;
constexpr int kGroupTileBytes = kGroupKeys * kTileColumns * 2;

// Contents of the cache and their way to shared memory: 16-bit rows as boxes of pages by the copy
// engine or row by row, e4m3 rows, or rows of KvLayout::mla_fp8_rows.
enum Keys : int { pages, rows, e4m3, fp8_rows };
constexpr bool is_fp8(Keys keys) { return keys == e4m3 || keys == fp8_rows; }

// A where kFirst, else B.
template <bool kFirst, class A, class B>
struct Selected {
  using Type = A;
};
template <class A, class B>
struct Selected<false, A, B> {
  using Type = B;
};
template <bool kFirst, class A, class B>
using Select = typename Selected<kFirst, A, B>::Type;
struct Nothing {};

// kTiles column tiles of 64 keys.
template <int kTiles>
struct KeyTiles {
  uint16_t groups[kTileKeys / kGroupKeys][kTiles][kGroupKeys][kTileColumns];
  static constexpr int kGroupBytes = kTiles * kGroupTileBytes;

  __device__ __forceinline__ uint16_t (&row(int tile, int key))[kTileColumns] {
    return groups[key / kGroupKeys][tile][key % kGroupKeys];
  }
};

// Where a block keeps its queries, in column tiles.
struct QueryLayout {
  int register_tiles;  // the first ones, read into registers out of stages of the ring
  int shared_tiles;    // the others, with the RoPE columns last
  int box_tiles;       // latent tiles that one copy brings where a box holds all rows
  int warps;           // warps that start these copies
  int stages;          // stages of the ring that bring the register tiles
};

}  // namespace fovea::kernels::cuda
