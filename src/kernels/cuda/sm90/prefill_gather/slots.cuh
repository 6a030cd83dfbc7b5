// SPDX-License-Identifier: Apache-2.0
// Data that the producer warps of prefill_gather hand each other in shared memory.
#pragma once

#include "kernels/cuda/sm90/common/work_tile.cuh"

namespace fovea::kernels::cuda {

// Pieces of raw fp8 rows: one is widened while two are being copied. If different warps widen K and
// V, each place has barriers for either: with one, whose phase both completed, neither warp would
// know whose copy has arrived.
template <bool kWidensApart, int kRow>
struct RawPieces {
  static constexpr int kPieces = 3;
  static constexpr int kBarriers = kWidensApart ? 2 * kPieces : kPieces;
  static constexpr int kRowBytes = kRow;
};

// For key tiles whose rows are found: whether the request owns all keys.
template <int kPlaceSlots>
struct WholeTiles {
  bool at[kPlaceSlots];
};

// A key tile over pages of one token, for the warps that gather its rows.
struct TokenTile {
  const char* k;  // the row in page 0; null: there is no further key tile
  const char* v;
  Interval live;  // keys to be read, counted from the tile's first one
};
constexpr int kTokenSlots = 8;
template <int kKeys>
struct TokenMemory {
  alignas(16) int32_t pages[kTokenSlots][kKeys];
  TokenTile tiles[kTokenSlots];
  TransactionBarrier full[kTokenSlots], empty[kTokenSlots];
};

}  // namespace fovea::kernels::cuda
