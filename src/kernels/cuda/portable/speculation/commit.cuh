// SPDX-License-Identifier: Apache-2.0
// The move of accepted rows, in all layers of all pools at once. A warp moves one piece of a
// request's rows, in units of 16 or 4 bytes.
#pragma once

#include "kernels/cuda/portable/speculation/config.cuh"

namespace fovea::kernels::cuda {

struct CommitConfig {
  using Params = CommitDraftsParams;
  static constexpr int kWarps = 8;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kAtOnce = 4;  // rows whose loads are in flight together
  static constexpr KernelTraits kTraits = {32 * kWarps, 0, kWarps, 0};

  // Copies unit `unit` of all rows that move. Four rows are read before the first is written:
  // a row moves to a place before it, so no row is overwritten that has not been read.
  template <typename Unit>
  __device__ static void move(const Params& params, const RowPiece& piece, int64_t first,
                              int count) {
    const int units = piece.bytes / static_cast<int>(sizeof(Unit));
    for (int i = 0; i < count; i += kAtOnce) {
      const Unit* from[kAtOnce];
      Unit* to[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        from[k] = nullptr;
        if (i + k >= count) continue;
        const int node = params.nodes[first + i + k];
        if (node <= i + k || node >= params.width) continue;
        from[k] = reinterpret_cast<const Unit*>(piece_at(piece, params.out_slots[first + node]));
        to[k] = reinterpret_cast<Unit*>(piece_at(piece, params.out_slots[first + i + k]));
        if (to[k] == nullptr) from[k] = nullptr;
      }
      for (int unit = static_cast<int>(threadIdx.x % 32); unit < units; unit += 32) {
        Unit values[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (from[k] != nullptr) values[k] = from[k][unit];
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          if (from[k] != nullptr) to[k][unit] = values[k];
        }
      }
    }
  }

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int request = static_cast<int>(blockIdx.x);
    const int index = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x / 32);
    if (blockIdx.y == 0 && threadIdx.x == 0) commit_request(params, request);
    const int count = accepted_count(params, request);
    const int64_t first = static_cast<int64_t>(request) * params.width;
    // Numbers ascend, so the last node in its place means that all are.
    if (count == 0 || params.nodes[first + count - 1] == count - 1) return;
    if (index >= params.piece_count) return;
    const RowPiece piece = params.pieces[index];
    if (piece.unit == sizeof(int4))
      move<int4>(params, piece, first, count);
    else
      move<int>(params, piece, first, count);
  }
};

}  // namespace fovea::kernels::cuda
