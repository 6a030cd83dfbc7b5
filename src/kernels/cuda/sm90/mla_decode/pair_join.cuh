// SPDX-License-Identifier: Apache-2.0
// Joins a row tile of two parts, one in each block of a cluster: each block sends the other one
// half of the columns and joins the other half.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/sm90/mla_decode/epilogue.cuh"

namespace fovea::kernels::cuda {

// Weights of two parts of a row, and the LSE of both.
struct PairWeights {
  float own, other, lse;
  __device__ __forceinline__ PairWeights(float own_lse, float other_lse) {
    const float larger = fmaxf(own_lse, other_lse);
    const float base = larger == -infinity() ? 0 : larger;
    own = exp2_fast((own_lse - base) * kLog2E);
    other = exp2_fast((other_lse - base) * kLog2E);
    const float total = own + other;
    const float inverse = total > 0 ? __fdividef(1.0f, total) : 0;
    own *= inverse;
    other *= inverse;
    lse = total > 0 ? base + log2f(total) * kLn2 : -infinity();
  }
};

// A value warpgroup of one block.
template <class C>
class PairJoin {
 public:
  __device__ __forceinline__ PairJoin(const MlaDecodeParams& params,
                                      typename C::SharedMemory& shared, const RowTile& tile,
                                      int half)
      : params_(params), shared_(shared), tile_(tile), half_(half) {}

  __device__ __forceinline__ void join(const ValueRows<C>& values) {
    const int part = cluster_rank();
    if (half_ == part) {
      add_and_store(values);
    } else {
      send(part ^ 1, values);
    }
  }

 private:
  // Values arrive over the queries: rows by chunks of 32 columns, of which a thread has eight. The
  // words of neighbouring threads are next to each other.
  static constexpr int kChunks = C::kValueColumns / 32;
  static_assert(2 * kChunks * kWarpgroupThreads * sizeof(uint4) <= sizeof(C::SharedMemory::q));
  __device__ __forceinline__ uint4* received() const {
    return reinterpret_cast<uint4*>(&shared_.q) + threadIdx.x % kWarpgroupThreads;
  }
  __device__ __forceinline__ static constexpr int place(int r, int chunk) {
    return (r * kChunks + chunk) * kWarpgroupThreads;
  }

  // Sends the half to block `other` as f16, in multiples of a unit.
  __device__ __forceinline__ void send(uint32_t other, const ValueRows<C>& values) {
    const uint32_t there = address_in_cluster(received(), other);
    const uint32_t full = address_in_cluster(&shared_.pair.full, other);
    shared_.pair.ready.wait(0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t unit = unit_bits(values.largest(r) * values.inverse[r]);
      const float factor = values.inverse[r] * inverse_unit(unit);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* two = values.out + 4 * (4 * c + i) + 2 * r;
          words[i] = pack_here<f16>(two[0] * factor, two[1] * factor);
        }
        store_in_cluster(there + place(r, c) * sizeof(uint4), words, full);
      }
      if (threadIdx.x % 4 == 0) {
        const int row = thread_row(r);
        store_in_cluster(&shared_.pair.received[row].x, other,
                         float2{shared_.pair.lse[row], __uint_as_float(unit)}, shared_.pair.full);
      }
    }
  }

  // Adds what the other block has sent of the half, and stores the sum.
  __device__ __forceinline__ void add_and_store(const ValueRows<C>& values) {
    const uint32_t from = shared_address(received());
    auto& pair = shared_.pair;
    const RowTile* const at = &tile_;
    if (threadIdx.x % kWarpgroupThreads == 0) {
      pair.full.arrive_expecting(kTileRows *
                                 (C::kValueColumns * sizeof(uint16_t) + sizeof(float2)));
    }
    pair.full.wait(0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Computed anew for each row: kept values would not fit the registers.
      const RowTile& tile = *opaque(at);
      const int row = static_cast<int>(opaque(thread_row(r)));
      const bool valid = row < tile.rows;
      const float2 received = pair.received[row];
      const PairWeights weights(pair.lse[row], received.x);
      const float scale = weights.own * values.inverse[r];
      const float other_scale = weights.other * received.y;
      if (half_ == 0 && params_.out.lse && valid && threadIdx.x % 4 == 0) {
        params_.out
            .lse[static_cast<int64_t>(tile.view.q_begin) * params_.q_heads + tile.first_row + row] =
            weights.lse;
      }
      uint16_t* to = output_row<C>(params_, tile, half_, valid ? row : 0);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        uint32_t theirs[4];  // one chunk after the other, as registers are short
        load_here(theirs, from + place(r, c) * sizeof(uint4));
        uint32_t sums[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* two = values.out + 4 * (4 * c + i) + 2 * r;
          sums[i] = pack_here<C::kQ>(
              two[0] * scale + to_float<f16>(static_cast<uint16_t>(theirs[i])) * other_scale,
              two[1] * scale + to_float<f16>(static_cast<uint16_t>(theirs[i] >> 16)) * other_scale);
        }
        store_words(to + 32 * c, valid, sums);
      }
    }
  }

  const MlaDecodeParams& params_;
  typename C::SharedMemory& shared_;
  const RowTile& tile_;
  const int half_;
};

}  // namespace fovea::kernels::cuda
