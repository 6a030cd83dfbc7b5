// SPDX-License-Identifier: Apache-2.0
// The value warpgroups: each multiplies weights with one half of the value columns.
#pragma once

#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/mla_decode/pair_join.cuh"
#include "kernels/cuda/sm90/mla_decode/scores.cuh"

namespace fovea::kernels::cuda {

// Columns of the widest product that a kernel of 512 threads may name: the compiler limits
// instructions to the 128 registers that a thread starts with.
constexpr int kProductColumns = 128;

template <class C>
class ValueWarpgroup {
 public:
  // half: 0 is L, columns from 0 on; 1 is R.
  __device__ __forceinline__ ValueWarpgroup(const MlaDecodeParams& params,
                                            typename C::SharedMemory& shared, int half)
      : params_(params), shared_(shared), half_(half) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const RowTile& tile = reader_.take(shared_);
      if (tile.tiles < 0) return;
      ValueRows<C> values = {};
      accumulate(tile.tiles, values);
      if constexpr (C::kPairs) {
        if (tile.paired) {  // the only item of the block
          PairJoin<C>(params_, shared_, tile, half_).join(values);
          return;
        }
      }
      store_values<C>(params_, tile, half_, values);
      reader_.give_back(shared_);
    }
  }

 private:
  __device__ __forceinline__ void accumulate(int tiles, ValueRows<C>& values) {
    const int warp = threadIdx.x % kWarpgroupThreads / 32;
    if (tiles > 0) keys_.advance(C::kQueries.stages);
    for (int t = 0; t < tiles; ++t) {
      const int slot = weights_.stage;
      shared_.weights_full[slot].wait(weights_.phase);
      if (t > 0 && shared_.rescaled[slot][warp]) rescale(slot, values);
      scores_.advance();
      // The whole block waits for the scores of the next tile, so only half of the values compete
      // with them, and the other half runs during the softmax that follows. Holding both back would
      // keep stages from the next keys. Over converted keys, which wait for free stages more than
      // for products, half R only begins after the scores have begun.
      if (half_ == 1 && t + 1 < tiles) shared_.scores_done[scores_.stage].wait(scores_.phase);
      Ring<C::kStages> own = keys_;
      if (half_) own.advance();
      // The last products run one after the other, so that half L is stored while R is multiplied.
      const bool last = !C::kFp8 && t + 1 == tiles;
      if (last && half_ == 1) named_barrier_wait(half_l_before_r, 2 * kWarpgroupThreads);
      add(own.stage, slot, values);
      if (last && half_ == 0) named_barrier_wait(half_l_before_r, 2 * kWarpgroupThreads);
      if (t + 1 == tiles) take_sums(values);
      release_stage<C>(shared_.empty[own.stage]);
      release(shared_.weights_empty[slot]);
      weights_.advance();
      keys_.advance();
      keys_.advance();
    }
  }

  __device__ __forceinline__ void rescale(int slot, ValueRows<C>& values) const {
    const float factors[2] = {shared_.rescale[slot][thread_row(0)],
                              shared_.rescale[slot][thread_row(1)]};
#pragma unroll
    for (int i = 0; i < C::kValueColumns / 2; ++i) values.out[i] *= factors[i / 2 % 2];
  }

  // Adds weights * values of one key tile. Complete on return.
  __device__ __forceinline__ void add(int stage, int slot, ValueRows<C>& values) {
    constexpr int kGroupBytes = KeyTiles<C::kStageTiles>::kGroupBytes;
    const uint64_t weights = rows_descriptor(shared_address(shared_.weights[slot]));
    const uint64_t columns =
        columns_descriptor(shared_address(&shared_.kv[stage]), kGroupTileBytes, kGroupBytes);
    products_begin();
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
#pragma unroll
      for (int part = 0; part < C::kValueColumns / kProductColumns; ++part) {
        Product<kProductColumns>::template run<C::kMath, true>(
            values.out + part * kProductColumns / 2, weights + step * 32 / 16,
            columns + (step * 2 * kGroupBytes +
                       part * (kProductColumns / kTileColumns) * kGroupTileBytes) /
                          16,
            true);
      }
    }
    products_commit();
    products_wait<0>();
    products_landed(values.out);
  }

  // Before the last weight slot is released, so that sums are no further ahead than weights.
  __device__ __forceinline__ void take_sums(ValueRows<C>& values) {
    shared_.sums_full[sums_.stage].wait(sums_.phase);
    values.inverse[0] = shared_.inverse_sum[sums_.stage][thread_row(0)];
    values.inverse[1] = shared_.inverse_sum[sums_.stage][thread_row(1)];
    sums_.advance();
  }

  const MlaDecodeParams& params_;
  typename C::SharedMemory& shared_;
  const int half_;
  TileReader<C> reader_;
  Ring<C::kStages> keys_;
  Ring<C::kWeightSlots> weights_;
  Ring<2> scores_, sums_;
};

}  // namespace fovea::kernels::cuda
