// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with a matrix, which read the matrix once at the rate of the memory.
//
//   weight ---cp.async--> [stage 0|1|...] of each lane --> mma.sync --> sums of 8 warps --> out
//   x ---------------------------------------------------> registers
//
// The eight warps of a block share k and add their sums in their order. The weight is the left
// operand of mma.sync, so that up to 8 rows of x are one instruction. A sum over k has no order, so
// a lane takes 8 neighbours in k of a row, 16 bytes, where the instruction has two pairs of pairs:
// what it copies to shared memory is what it multiplies, and stages need no barrier. Copies of the
// weight begin before the preceding kernel has ended, since no kernel writes weights; the factors
// of a norm are found while they arrive.
#pragma once

#include "kernels/cuda/portable/skinny_gemm/config.cuh"

namespace fovea::kernels::cuda {

template <int kColumnTile, int kRowTile>
struct SkinnyGemm {
  using Params = SkinnyGemmParams;
  using Sizes = SkinnySizes<kColumnTile, kRowTile>;
  static constexpr int kBlocksPerSm = __CUDA_ARCH__ >= 1000 ? 2 : 3;  // three spill there
  static constexpr KernelTraits kTraits = {Sizes::kThreads, Sizes::kSharedBytes, kRowTile,
                                           kColumnTile};
  static constexpr int kColumnBlocks = Sizes::kColumnBlocks, kRowBlocks = Sizes::kRowBlocks;
  static constexpr int kChunks = Sizes::kChunks, kStages = Sizes::kStages;
  static constexpr bool kInTurn = kColumnTile == 32;  // chosen on H200, 2026-11-29: 3 % faster
  static constexpr int kTurn = 7;  // pieces between the first ones of neighbouring blocks

  // Rows of x for one stage.
  struct Operand {
    uint4 values[kRowBlocks][kChunks];
  };

  const Params& params;
  const uint16_t* rows[kColumnBlocks][2];  // the lane's rows of the weight, at its first element
  bool live[kColumnBlocks][2];
  const uint16_t* x;  // the lane's first row of x, at its first element
  uint32_t ring;      // the lane's copies in stage 0
  float* factors;     // [kRowTile], shared: those of the norm before the product, or 1
  int group;          // the lane's row of a block of 8

  __device__ explicit SkinnyGemm(const Params& given, char* memory) : params(given) {
    const int lane = threadIdx.x % 32;
    group = lane / 4;
    const int first = lane % 4 * 8;
    ring = shared_address(memory) + threadIdx.x * 16;
    factors = reinterpret_cast<float*>(memory + kStages * Sizes::kStageBytes);
    x = static_cast<const uint16_t*>(params.x) + group * params.x_stride + first;
    for (int block = 0; block < kColumnBlocks; ++block) {
      for (int half = 0; half < 2; ++half) {
        const WeightRow row(params, blockIdx.x * kColumnTile, block * 16 + half * 8 + group);
        live[block][half] = row.live;
        rows[block][half] = row.at + first;
      }
    }
  }

  // The lane's copy of a chunk, as an offset in its stage.
  __device__ static int place(int block, int half, int chunk) {
    return ((block * 2 + half) * kChunks + chunk) * Sizes::kThreads * 16;
  }

  __device__ void copy_stage(int stage, int depth) const {
    const uint32_t to = ring + stage * Sizes::kStageBytes;
#pragma unroll
    for (int block = 0; block < kColumnBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          copy_line_or_zero_async(to + place(block, half, chunk),
                                  rows[block][half] + depth + chunk * 32, live[block][half]);
        }
      }
    }
  }

  // Loads past the L1 cache, which may hold what this memory was before the preceding kernel.
  __device__ Operand load_x(int depth) const {
    Operand operand;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const bool is_row = block * 8 + group < params.rows;
        const uint16_t* const from = x + block * 8 * params.x_stride + depth + chunk * 32;
        operand.values[block][chunk] =
            is_row ? __ldcg(reinterpret_cast<const uint4*>(from)) : uint4{0, 0, 0, 0};
      }
    }
    return operand;
  }

  __device__ void multiply_stage(int stage, const Operand& operand,
                                 float (&sums)[kColumnBlocks][kRowBlocks][4]) const {
    const uint32_t from = ring + stage * Sizes::kStageBytes;
#pragma unroll
    for (int block = 0; block < kColumnBlocks; ++block) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        uint32_t low[4], high[4];
        load_here(low, from + place(block, 0, chunk));
        load_here(high, from + place(block, 1, chunk));
        const uint32_t first[4] = {low[0], high[0], low[1], high[1]};
        const uint32_t second[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
        for (int row = 0; row < kRowBlocks; ++row) {
          const uint4 values = operand.values[row][chunk];
          multiply_add<bf16>(sums[block][row], first, values.x, values.y);
          multiply_add<bf16>(sums[block][row], second, values.z, values.w);
        }
      }
    }
  }

  // Adds the products of the warp's part of k: adjacent pieces, or every eighth. Each block begins
  // with another piece, so that blocks do not read the same columns at a time. Loads that nothing
  // depends on begin together.
  __device__ ProductOutputs::Early multiply(float (&sums)[kColumnBlocks][kRowBlocks][4]) const {
    const int pieces = params.k / Sizes::kDepth;
    const int warp = threadIdx.x / 32;
    const int begin = kInTurn ? warp : pieces * warp / Sizes::kWarps;
    const int count = kInTurn ? (pieces - warp + Sizes::kWarps - 1) / Sizes::kWarps
                              : pieces * (warp + 1) / Sizes::kWarps - begin;
    const int first = count > 0 ? static_cast<int>(blockIdx.x * kTurn % count) : 0;
    const auto depth_of = [&](int step) {
      const int piece = first + step < count ? first + step : first + step - count;
      return (begin + piece * (kInTurn ? Sizes::kWarps : 1)) * Sizes::kDepth;
    };
    for (int stage = 0; stage < kStages; ++stage) {
      if (stage < count) copy_stage(stage, depth_of(stage));
      commit_copies();
    }
    wait_and_allow_next();
    const ProductOutputs outputs = {params, factors};
    const auto early = outputs.load_early(blockIdx.x * kColumnTile, kColumnTile);
    Operand operand = load_x(count > 0 ? depth_of(0) : 0);
    outputs.find_factors(warp, Sizes::kWarps);
    int stage = 0;
    for (int step = 0; step < count; ++step) {
      const Operand next = load_x(depth_of(min(step + 1, count - 1)));
      wait_copies<kStages - 1>();
      multiply_stage(stage, operand, sums);
      if (step + kStages < count) copy_stage(stage, depth_of(step + kStages));
      commit_copies();
      operand = next;
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    return early;
  }

  // Stores the warp's sums as [row][column of the tile].
  __device__ static void store_sums(const float (&sums)[kColumnBlocks][kRowBlocks][4],
                                    float* parts) {
    const int lane = threadIdx.x % 32;
    float* const part = parts + threadIdx.x / 32 * Sizes::kPartFloats;
    for (int block = 0; block < kColumnBlocks; ++block) {
      for (int row = 0; row < kRowBlocks; ++row) {
        for (int i = 0; i < 4; ++i) {
          const int column = block * 16 + lane / 4 + i / 2 * 8;
          part[(row * 8 + lane % 4 * 2 + i % 2) * kColumnTile + column] = sums[block][row][i];
        }
      }
    }
  }

  __device__ static float sum_at(const float* parts, int row, int column) {
    float sum = 0;
    for (int warp = 0; warp < Sizes::kWarps; ++warp) {
      sum += parts[warp * Sizes::kPartFloats + row * kColumnTile + column];
    }
    return sum;
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    const SkinnyGemm gemm(params, dynamic_shared);
    float sums[kColumnBlocks][kRowBlocks][4] = {};
    const ProductOutputs::Early early = gemm.multiply(sums);
    __syncthreads();  // all warps have read their stages
    auto* const parts = reinterpret_cast<float*>(dynamic_shared);
    store_sums(sums, parts);
    __syncthreads();
    const ProductOutputs outputs = {params, gemm.factors};
    outputs.store_all(
        blockIdx.x * kColumnTile, kColumnTile, Sizes::kThreads,
        [&](int row, int column) { return sum_at(parts, row, column); }, early);
  }
};

template <int kColumnTile, int kRowTile>
using Config = SkinnyGemm<kColumnTile, kRowTile>;

}  // namespace fovea::kernels::cuda
