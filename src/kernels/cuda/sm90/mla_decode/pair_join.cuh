// SPDX-License-Identifier: Apache-2.0
// The two parts of a row tile, which blocks of a cluster have: each sends the other one half of the
// columns and joins the other half.
#pragma once

#include "kernels/cuda/sm90/mla_decode/epilogue.cuh"

namespace fovea::kernels::cuda {

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

// Where a thread's values of the other part come to, side by side with its neighbours': rows by
// chunks of 32 columns, of which a thread has eight.
template <class C>
struct PairValues {
  static constexpr int kChunks = C::kValueColumns / 32;
  uint4* at;
  __device__ __forceinline__ explicit PairValues(typename C::SharedMemory& shared)
      : at(reinterpret_cast<uint4*>(&shared.q) + threadIdx.x % kWarpgroupThreads) {
    static_assert(2 * kChunks * kWarpgroupThreads * sizeof(uint4) <= sizeof(shared.q));
  }
  __device__ __forceinline__ static constexpr int place(int r, int chunk) {
    return (r * kChunks + chunk) * kWarpgroupThreads;
  }
};

// A warpgroup's half of the values to the other block, as f16 in multiples of a unit.
template <class C>
__device__ __forceinline__ void send_half(typename C::SharedMemory& shared, uint32_t other,
                                          const float (&out)[C::kValueColumns / 2],
                                          const float (&inverse)[2]) {
  const PairValues<C> values(shared);
  const uint32_t there = address_in_cluster(values.at, other);
  const uint32_t full = address_in_cluster(&shared.pair.full, other);
  shared.pair.ready.wait(0);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t unit = unit_bits(largest<C>(out, r) * inverse[r]);
    const float factor = inverse[r] * __uint_as_float((254u << 23) - unit);
#pragma unroll
    for (int c = 0; c < values.kChunks; ++c) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = out + 4 * (4 * c + i) + 2 * r;
        words[i] = pack_here<f16>(two[0] * factor, two[1] * factor);
      }
      store_in_cluster(there + values.place(r, c) * sizeof(uint4), words, full);
    }
    if (threadIdx.x % 4 == 0) {
      const int row = thread_row(r);
      store_in_cluster(&shared.pair.received[row].x, other,
                       float2{shared.pair.lse[row], __uint_as_float(unit)}, shared.pair.full);
    }
  }
}

// Adds what the other block has sent of a half, and stores it.
template <class C>
__device__ __forceinline__ void join_half(const MlaDecodeParams& params,
                                          typename C::SharedMemory& shared, const RowTile* at,
                                          int half, const float (&out)[C::kValueColumns / 2],
                                          const float (&inverse)[2]) {
  const PairValues<C> values(shared);
  const uint32_t from = shared_address(values.at);
  auto& pair = shared.pair;
  if (threadIdx.x % kWarpgroupThreads == 0) {
    pair.full.arrive_expecting(kTileRows * (C::kValueColumns * sizeof(uint16_t) + sizeof(float2)));
  }
  pair.full.wait(0);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // What is found for a row and kept for the next one would not fit the registers.
    const RowTile& tile = *opaque(at);
    const int row = static_cast<int>(opaque(thread_row(r)));
    const bool valid = row < tile.rows;
    const float2 received = pair.received[row];
    const PairWeights weights(pair.lse[row], received.x);
    const float scale = weights.own * inverse[r];
    const float other_scale = weights.other * received.y;
    if (half == 0 && params.lse && valid && threadIdx.x % 4 == 0) {
      params.lse[static_cast<int64_t>(tile.view.q_begin) * params.q_heads + tile.first_row + row] =
          weights.lse;
    }
    uint16_t* to = output_row<C>(params, tile, half, valid ? row : 0);
#pragma unroll
    for (int c = 0; c < values.kChunks; ++c) {
      uint32_t theirs[4];  // one chunk after the other: all at once would not fit the registers
      load_here(theirs, from + values.place(r, c) * sizeof(uint4));
      uint32_t sums[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* two = out + 4 * (4 * c + i) + 2 * r;
        sums[i] = pack_here<C::kQ>(
            two[0] * scale + to_float<f16>(static_cast<uint16_t>(theirs[i])) * other_scale,
            two[1] * scale + to_float<f16>(static_cast<uint16_t>(theirs[i] >> 16)) * other_scale);
      }
      store_words(to + 32 * c, valid, sums);
    }
  }
}

template <class C>
__device__ __forceinline__ void join_pair(const MlaDecodeParams& params,
                                          typename C::SharedMemory& shared, const RowTile& tile,
                                          int half, const float (&out)[C::kValueColumns / 2],
                                          const float (&inverse)[2]) {
  const int part = cluster_rank();
  if (half == part) {
    join_half<C>(params, shared, &tile, half, out, inverse);
  } else {
    send_half<C>(shared, part ^ 1, out, inverse);
  }
}

}  // namespace fovea::kernels::cuda
