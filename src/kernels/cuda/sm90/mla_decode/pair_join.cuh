// SPDX-License-Identifier: Apache-2.0
// The two parts of a row tile, joined by the block that is done last; the other one has stored its
// part and left. Which of them it is does not change the result.
#pragma once

#include "kernels/cuda/sm90/mla_decode/epilogue.cuh"

namespace fovea::kernels::cuda {

// Whether this warpgroup is the second to come; then it sees what the first stored before. flag: in
// shared memory. Leaves the counter at 0.
__device__ __forceinline__ bool comes_second(uint32_t* arrivals, int barrier, uint32_t& flag) {
  named_barrier_wait(barrier, kWarpgroupThreads);
  if (threadIdx.x % kWarpgroupThreads == 0) {
    uint32_t before;
    asm volatile("fence.acq_rel.gpu;\natom.acq_rel.gpu.global.inc.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(arrivals)
                 : "memory");
    flag = before;
  }
  named_barrier_wait(barrier, kWarpgroupThreads);
  return flag == 1;
}

// What another block has stored, from the L2; stays where it stands, for all loads at once would
// not fit the registers.
__device__ __forceinline__ uint4 load_others(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// What two parts weigh, from their LSE.
struct PairWeights {
  float own, other, lse;
  __device__ __forceinline__ PairWeights(float own_lse, float other_lse) {
    const float most = fmaxf(own_lse, other_lse);
    const float base = most == -infinity() ? 0 : most;
    own = exp2_fast((own_lse - base) * kLog2E);
    other = exp2_fast((other_lse - base) * kLog2E);
    const float total = own + other;
    const float inverse = total > 0 ? __fdividef(1.0f, total) : 0;
    own *= inverse;
    other *= inverse;
    lse = total > 0 ? base + log2f(total) * kLn2 : -infinity();
  }
};

// A warpgroup's half of the values. A thread stores what it has side by side with its neighbours,
// and finds the other part's values of the same rows and columns in the same place.
template <class C>
__device__ __forceinline__ void join_pair(const MlaDecodeParams& params,
                                          typename C::SharedMemory& shared, const RowTile& tile,
                                          int half, const float (&out)[C::kValueColumns / 2],
                                          const float (&inverse)[2]) {
  constexpr int kChunks = C::kValueColumns / 32;  // of 8 values, of a row
  const MlaWorkList& work = params.work;
  const int slot = tile.item.partial;
  const int other_slot = (slot + 1 ^ 1) - 1;
  const auto row_of = [&](int part, int r) {
    return (static_cast<int64_t>(part) * C::kBlocks + block_rank<C>()) * kTileRows + thread_row(r);
  };
  const auto values_of = [&](int part) {
    const int64_t place = (static_cast<int64_t>(part) * C::kBlocks + block_rank<C>()) * 2 + half;
    return static_cast<uint4*>(work.partial_out) + place * (2 * kChunks * kWarpgroupThreads) +
           threadIdx.x % kWarpgroupThreads;
  };
  uint32_t words[2][C::kValueColumns / 8];
  float unit[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t bits = unit_bits(largest<C>(out, r) * inverse[r]);
    const float factor = inverse[r] * __uint_as_float((254u << 23) - bits);
    unit[r] = __uint_as_float(bits);
#pragma unroll
    for (int i = 0; i < C::kValueColumns / 8; ++i) {
      words[r][i] = pack_here<f16>(out[4 * i + 2 * r] * factor, out[4 * i + 2 * r + 1] * factor);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint32_t* w = words[r] + 4 * c;
      values_of(slot)[(r * kChunks + c) * kWarpgroupThreads] = {w[0], w[1], w[2], w[3]};
    }
    if (threadIdx.x % 4 == 0) work.partial_units[2 * row_of(slot, r) + half] = unit[r];
  }
  uint32_t* arrivals = &work.arrivals[(slot - 1) / 2 * 4 + block_rank<C>() * 2 + half];
  if (!comes_second(arrivals, 2 + half, shared.arrived[half])) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = thread_row(r);
    const bool valid = row < tile.rows;
    const PairWeights weights(__ldcg(&work.partial_lse[row_of(slot, r)]),
                              __ldcg(&work.partial_lse[row_of(other_slot, r)]));
    const float scale = weights.own * unit[r];
    const float other_scale =
        weights.other * __ldcg(&work.partial_units[2 * row_of(other_slot, r) + half]);
    uint16_t* to = output_row<C>(params, tile, half, valid ? row : 0);
    uint4 got[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      got[c] = load_others(values_of(other_slot) + (r * kChunks + c) * kWarpgroupThreads);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint32_t theirs[4] = {got[c].x, got[c].y, got[c].z, got[c].w};
      uint32_t sums[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Else all are unpacked while the others are on their way, and do not fit the registers.
        const uint32_t own = fresh(words[r][4 * c + i]);
        float sum[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          // Either may be the own one: rounded alike.
          sum[k] = __fadd_rn(
              __fmul_rn(to_float<f16>(static_cast<uint16_t>(own >> 16 * k)), scale),
              __fmul_rn(to_float<f16>(static_cast<uint16_t>(theirs[i] >> 16 * k)), other_scale));
        }
        sums[i] = pack_here<C::kQ>(sum[0], sum[1]);
      }
      store_words(to + 32 * c, valid, sums);
    }
    if (half == 0 && params.lse && valid && threadIdx.x % 4 == 0) {
      params.lse[static_cast<int64_t>(tile.view.q_begin) * params.q_heads + tile.first_row +
                 row] = weights.lse;
    }
  }
}

template <class C>
__device__ __forceinline__ void store_values(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared, const RowTile& tile,
                                             int half, const float (&out)[C::kValueColumns / 2],
                                             const float (&inverse)[2]) {
  if constexpr (C::kPairs) {
    if (tile.paired) {
      join_pair<C>(params, shared, tile, half, out, inverse);
      return;
    }
  }
  if (tile.item.partial >= 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) store_partial_row<C>(params, tile, half, r, out, inverse[r]);
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) store_output_row<C>(params, tile, half, r, out, inverse[r]);
  }
}

}  // namespace fovea::kernels::cuda
