// SPDX-License-Identifier: Apache-2.0
// Copies and products of a warp: its pieces of k, of one expert after another.
#pragma once

#include "kernels/cuda/sm90/skinny_experts/config.cuh"

namespace fovea::kernels::cuda {

// The pieces of a warp. Where k does not divide evenly, other warps have more for each expert.
struct Walk {
  const Chosen& chosen;
  int slot, end;      // experts
  int place, pieces;  // in k, from the block's first piece on
  int warp, warps;    // among all that share k
  int turn;           // the block's first piece

  __device__ __forceinline__ bool is_live() const { return slot < end; }
  __device__ __forceinline__ void begin_expert() {
    if (is_live()) place = (warp + chosen.expert[slot]) % warps;
  }
  // Goes to the first expert of which the warp has a piece.
  __device__ __forceinline__ void settle() {
    while (is_live() && place >= pieces) {
      ++slot;
      begin_expert();
    }
  }
  __device__ __forceinline__ void start() {
    begin_expert();
    settle();
  }
  __device__ __forceinline__ void advance() {
    place += warps;
    settle();
  }
  __device__ __forceinline__ int piece() const {
    const int turned = place + turn;
    return turned < pieces ? turned : turned - pieces;
  }
};

template <Product kProduct, bool kIsKn, int kColumns, int kStageCount>
struct ExpertPieces {
  using Tiles = ExpertTiles<kIsKn, kColumns, kStageCount>;
  static constexpr int kBlocks = Tiles::kBlocks, kDepth = Tiles::kDepth;
  static constexpr int kStages = Tiles::kStages, kCopies = Tiles::kCopies;
  static constexpr int kLaneValues = kDepth / 4;  // a lane's, of a row of x, in a piece
  using Values = uint32_t[kLaneValues / 2];

  const SkinnyExpertsParams& params;
  typename Tiles::SharedMemory& shared;
  int tile;
  uint32_t ring;                     // the warp's piece of stage 0
  int offsets[kIsKn ? 1 : kCopies];  // from the start of a matrix to the lane's copies
  bool live[kIsKn ? 1 : kCopies];
  bool takes_up;  // [k, n]: the lane's copies are those of ups

  __device__ __forceinline__ ExpertPieces(const SkinnyExpertsParams& given,
                                          typename Tiles::SharedMemory& memory, int of)
      : params(given), shared(memory), tile(of) {
    const int lane = threadIdx.x % 32;
    ring = shared_address(memory.stages[0][threadIdx.x / 32]);
    if constexpr (kIsKn) {
      const int chunk = lane % Tiles::kChunks;
      int column = tile * kColumns + chunk * 8, end = params.n;
      takes_up = false;
      if constexpr (kProduct == gated) {
        if (params.column_step > 1) {
          end *= 2;
        } else {
          takes_up = chunk % 2 != 0;
          column = tile * (kColumns / 2) + chunk / 2 * 8;
        }
      }
      live[0] = column < end;
      offsets[0] = lane / Tiles::kChunks * params.weight_stride + (live[0] ? column : 0);
    } else {
#pragma unroll
      for (int copy = 0; copy < kCopies; ++copy) {
        const int block = copy / 2, half = copy % 2, group = lane / 4;
        int row = tile * kColumns + block * 16 + half * 8 + group;
        if constexpr (kProduct == gated) row = tile * (kColumns / 2) + block * 8 + group;
        live[copy] = row < params.n;
        row = live[copy] ? row : 0;
        if constexpr (kProduct == gated) row *= params.column_step;
        offsets[copy] = row * params.weight_stride + lane % 4 * 8;
      }
    }
  }

  // Chunks of a row of k lie where eight rows of a matrix of ldmatrix are in different banks.
  __device__ __forceinline__ static int place_of(int depth, int chunk) {
    const int turn = Tiles::kChunks == 8 ? depth % 2 + depth / 4 * 2 : depth / 4;
    return (depth * Tiles::kChunks + (chunk ^ turn)) * 16;
  }

  __device__ __forceinline__ void copy_piece(int stage, const Walk& walk) const {
    const uint32_t to = ring + stage * (kWarps * Tiles::kPieceBytes);
    const int lane = threadIdx.x % 32, depth = walk.piece() * kDepth;
    const uint16_t* const gate = walk.chosen.gate[walk.slot];
    const uint16_t* const up = kProduct == gated ? walk.chosen.up[walk.slot] : nullptr;
    if constexpr (kIsKn) {
      constexpr int kStep = 32 / Tiles::kChunks;  // rows of k between the copies of a lane
      const uint16_t* const from =
          (takes_up ? up : gate) + offsets[0] + depth * params.weight_stride;
#pragma unroll
      for (int copy = 0; copy < kCopies; ++copy) {
        const int row = lane / Tiles::kChunks + copy * kStep;
        copy_line_or_zero_async(to + place_of(row, lane % Tiles::kChunks),
                                from + copy * kStep * params.weight_stride, live[0]);
      }
    } else {
#pragma unroll
      for (int copy = 0; copy < kCopies; ++copy) {
        const uint16_t* const matrix = kProduct == gated && copy % 2 != 0 ? up : gate;
        copy_line_or_zero_async(to + (copy * 32 + lane) * 16, matrix + offsets[copy] + depth,
                                live[copy]);
      }
    }
  }

  // Loads the lane's values of a row of x past the L1 cache, which may hold what this memory was
  // before the preceding kernel.
  __device__ __forceinline__ void load_x(Values& values, const Walk& walk) const {
    const int lane = threadIdx.x % 32, row = lane / 4;
    const int choice = walk.chosen.choice[walk.slot][row];
#pragma unroll
    for (uint32_t& value : values) value = 0;
    if (choice < 0) return;
    const uint16_t* const from = static_cast<const uint16_t*>(params.x) +
                                 (kProduct == gated ? row : choice) * params.x_stride +
                                 walk.piece() * kDepth + lane % 4 * kLaneValues;
    if constexpr (kIsKn) {
      const uint2 loaded = __ldcg(reinterpret_cast<const uint2*>(from));
      values[0] = loaded.x;
      values[1] = loaded.y;
    } else {
      const uint4 loaded = __ldcg(reinterpret_cast<const uint4*>(from));
      values[0] = loaded.x;
      values[1] = loaded.y;
      values[2] = loaded.z;
      values[3] = loaded.w;
    }
  }

  // A sum over k has no order, so a lane takes neighbours in k where the instruction asks for two
  // pairs that lie apart.
  __device__ __forceinline__ void multiply_piece(int stage, const Values& values,
                                                 float (&sums)[kBlocks][4]) const {
    const uint32_t from = ring + stage * (kWarps * Tiles::kPieceBytes);
    const int lane = threadIdx.x % 32;
    if constexpr (kIsKn) {
      const int matrix = lane / 8, row = lane % 8;
      const int depth = row / 2 * 4 + row % 2 + matrix / 2 * 2;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        uint32_t weight[4];
        load_matrices_transposed(weight,
                                 shared_pointer(from + place_of(depth, block * 2 + matrix % 2)));
        multiply_add<bf16>(sums[block], weight, values[0], values[1]);
      }
    } else {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        uint32_t low[4], high[4];
        load_here(low, from + (block * 64 + lane) * 16);
        load_here(high, from + (block * 64 + 32 + lane) * 16);
        const uint32_t first[4] = {low[0], high[0], low[1], high[1]};
        const uint32_t second[4] = {low[2], high[2], low[3], high[3]};
        multiply_add<bf16>(sums[block], first, values[0], values[1]);
        multiply_add<bf16>(sums[block], second, values[2], values[3]);
      }
    }
  }

  // Adds an expert's sums, times the factors of the rows that chose it, to those of all experts.
  __device__ __forceinline__ void add_expert(int slot, float (&sums)[kBlocks][4],
                                             float (&totals)[kBlocks][4]) const {
    const Chosen& chosen = shared.chosen;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int choice = chosen.choice[slot][threadIdx.x % 4 * 2 + i];
      const float factor = choice < 0 ? 0.0f : chosen.factor[choice];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& sum = sums[block][half * 2 + i];
          float& total = totals[block][half * 2 + i];
          if (choice >= 0) total = fmaf(factor, sum, total);
          sum = 0;
        }
      }
    }
  }

  // Fills the ring with weights, which no kernel writes.
  __device__ __forceinline__ void copy_first(Walk& walk) const {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (walk.is_live()) {
        copy_piece(stage, walk);
        walk.advance();
      }
      commit_copies();
    }
  }

  // Adds the products of the warp's pieces to `totals`. `walk` is at its first piece, `next` at the
  // piece behind the ring. Rows of x are loaded as far ahead as the weights.
  __device__ __forceinline__ void multiply(Walk walk, Walk next,
                                           float (&totals)[kBlocks][4]) const {
    Values values[kStages];
    {
      Walk ahead = walk;
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        if (!ahead.is_live()) break;
        load_x(values[stage], ahead);
        ahead.advance();
      }
    }
    float sums[kBlocks][4] = {};
    while (walk.is_live()) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        if (!walk.is_live()) break;
        wait_copies<kStages - 1>();
        if constexpr (kIsKn) __syncwarp();  // other lanes copied, too
        multiply_piece(stage, values[stage], kProduct == gated ? totals : sums);
        if constexpr (kIsKn) __syncwarp();
        if (next.is_live()) {
          copy_piece(stage, next);
          load_x(values[stage], next);
          next.advance();
        }
        commit_copies();
        const int slot = walk.slot;
        walk.advance();
        if constexpr (kProduct == combined) {
          if (walk.slot != slot) add_expert(slot, sums, totals);
        }
      }
    }
  }
};

}  // namespace fovea::kernels::cuda
