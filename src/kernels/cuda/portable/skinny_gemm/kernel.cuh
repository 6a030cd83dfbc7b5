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

template <int kTileStages>
struct SkinnyGemm {
  using Params = SkinnyGemmParams;
  using Sizes = SkinnySizes<kTileStages>;
  static constexpr int kBlocksPerSm = Sizes::kBlocksPerSm;
  static constexpr int kColumnTile = Sizes::kColumnTile, kColumnBlocks = Sizes::kColumnBlocks;
  static constexpr int kStages = Sizes::kStages;
  static constexpr KernelTraits kTraits = {Sizes::kThreads, Sizes::kSharedBytes, Sizes::kRowTile,
                                           kColumnTile};
  static constexpr int kTurn = 7;  // pieces between the first ones of neighbouring blocks

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

  // The lane's copy of a row, as an offset in its stage.
  __device__ static int place(int block, int half) {
    return (block * 2 + half) * Sizes::kThreads * 16;
  }

  __device__ void copy_stage(int stage, int depth) const {
    const uint32_t to = ring + stage * Sizes::kStageBytes;
#pragma unroll
    for (int block = 0; block < kColumnBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        copy_line_or_zero_async(to + place(block, half), rows[block][half] + depth,
                                live[block][half]);
      }
    }
  }

  // Loads past the L1 cache, which may hold what this memory was before the preceding kernel.
  __device__ uint4 load_x(int depth) const {
    if (group >= params.rows) return {0, 0, 0, 0};
    return __ldcg(reinterpret_cast<const uint4*>(x + depth));
  }

  __device__ void multiply_stage(int stage, uint4 values, float (&sums)[kColumnBlocks][4]) const {
    const uint32_t from = ring + stage * Sizes::kStageBytes;
#pragma unroll
    for (int block = 0; block < kColumnBlocks; ++block) {
      uint32_t low[4], high[4];
      load_here(low, from + place(block, 0));
      load_here(high, from + place(block, 1));
      const uint32_t first[4] = {low[0], high[0], low[1], high[1]};
      const uint32_t second[4] = {low[2], high[2], low[3], high[3]};
      multiply_add<bf16>(sums[block], first, values.x, values.y);
      multiply_add<bf16>(sums[block], second, values.z, values.w);
    }
  }

  // Adds the products of the warp's part of k, which is every eighth piece. Each block begins with
  // another piece, so that blocks do not read the same columns at a time. Loads that nothing
  // depends on begin together. A trip to the L2 cache takes longer than a step while the memory is
  // busy, so rows of x are loaded as far ahead as the weight.
  __device__ ProductOutputs::Early multiply(float (&sums)[kColumnBlocks][4]) const {
    const int pieces = params.k / Sizes::kDepth;
    const int warp = threadIdx.x / 32;
    const int count = (pieces - warp + Sizes::kWarps - 1) / Sizes::kWarps;
    const int first = count > 0 ? static_cast<int>(blockIdx.x * kTurn % count) : 0;
    const auto depth_of = [&](int step) {
      const int piece = first + step < count ? first + step : first + step - count;
      return (warp + piece * Sizes::kWarps) * Sizes::kDepth;
    };
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (stage < count) copy_stage(stage, depth_of(stage));
      commit_copies();
    }
    wait_and_allow_next();
    const ProductOutputs outputs = {params, factors};
    const auto early = outputs.load_early(blockIdx.x * kColumnTile, kColumnTile);
    uint4 values[kStages];
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (stage < count) values[stage] = load_x(depth_of(stage));
    }
    outputs.find_factors(warp, Sizes::kWarps);
    for (int step = 0; step < count; step += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        if (step + stage >= count) break;
        wait_copies<kStages - 1>();
        multiply_stage(stage, values[stage], sums);
        const int next = step + stage + kStages;
        if (next < count) {
          const int depth = depth_of(next);
          copy_stage(stage, depth);
          values[stage] = load_x(depth);
        }
        commit_copies();
      }
    }
    return early;
  }

  // Stores the warp's sums as [row][column of the tile].
  __device__ static void store_sums(const float (&sums)[kColumnBlocks][4], float* parts) {
    const int lane = threadIdx.x % 32;
    float* const part = parts + threadIdx.x / 32 * Sizes::kPartFloats;
    for (int block = 0; block < kColumnBlocks; ++block) {
      for (int i = 0; i < 4; ++i) {
        const int column = block * 16 + lane / 4 + i / 2 * 8;
        part[(lane % 4 * 2 + i % 2) * kColumnTile + column] = sums[block][i];
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
    float sums[kColumnBlocks][4] = {};
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

template <int kStages>
using Config = SkinnyGemm<kStages>;

}  // namespace fovea::kernels::cuda
