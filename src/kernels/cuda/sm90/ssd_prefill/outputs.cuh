// SPDX-License-Identifier: Apache-2.0
// The warpgroup of outputs, with tokens in rows: O = read Q S^T + P V, by the state before the
// chunk, which the other warpgroup hands over, and P_ij = scale decay_ij strength_j q_i k_j for j
// <= i, to whose diagonal the skip is added.
#pragma once

#include "kernels/cuda/sm90/ssd_prefill/config.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
class SsdOutputs {
 public:
  __device__ __forceinline__ SsdOutputs(const SsdPrefillParams& params, SsdMemory& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run(const Walk& walk) {
    const float skip = params_.skip ? params_.skip[walk.head] : 0;
#pragma unroll 1
    for (int n = 0; n < walk.chunks; ++n, ring_.advance(), turn_ ^= 1) {
      SsdStage& stage = shared_.stages[ring_.stage];
      shared_.full[ring_.stage].wait(ring_.phase);
      float sums[32], out[32];
      products_begin();
      multiply_rows<kType>(sums, stage.q, stage.k);
      products_commit();
      shared_.state.full.wait(turn_);
      products_begin();
      multiply_rows<kType>(out, stage.q, shared_.state.rows);
      products_commit();
      products_wait<1>();
      products_landed(sums);
      uint32_t scores[16];
      find_scores(scores, sums, stage.factors, skip);
      products_wait<0>();
      products_landed(out);
      release(shared_.state.empty);
      const Place place;
      const float read[2] = {stage.factors.read[place.row], stage.factors.read[place.row + 8]};
#pragma unroll
      for (int i = 0; i < 32; ++i) out[i] *= read[i % 4 / 2];
      products_begin();
      add_values(out, scores, stage.v);
      products_commit();
      products_wait<0>();
      products_landed(out);
      release(shared_.empty[ring_.stage]);
      const int first = n * kChunkTokens;
      __syncwarp();  // the last outputs have been read
      keep_outputs(out, shared_.out);
      __syncwarp();
      store_kept<16>(shared_.out, place.warp * 16, walk.out(params_, first),
                     params_.out_token_stride, walk.tokens - first);
    }
  }

 private:
  // to += scores v
  __device__ __forceinline__ static void add_values(float (&to)[32], const uint32_t (&scores)[16],
                                                    const Tile& v) {
    const uint64_t columns = columns_descriptor(shared_address(v), sizeof(Tile));
#pragma unroll
    for (int step = 0; step < kChunkTokens / 16; ++step) {
      Product<kBlockValues>::template run<kType, true>(to, scores + 4 * step,
                                                       moved(columns, step * 16 * 128), true);
    }
  }

  // Sums right of the diagonal may be of tokens of others.
  __device__ __forceinline__ void find_scores(uint32_t (&scores)[16], float (&sums)[32],
                                              const SsdFactors& factors, float skip) const {
    const Place place;
    const float rows[2] = {factors.decays[place.row], factors.decays[place.row + 8]};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int row = place.row + i % 4 / 2 * 8, column = i / 4 * 8 + place.column + i % 2;
      const float decay = exp2_fast(rows[i % 4 / 2] - factors.decays[column]);
      const float score = sums[i] * (decay * factors.strengths[column] * params_.scale);
      sums[i] = column < row ? score : column == row ? score + skip : 0;
    }
    round<kType>(scores, sums);
  }

  const SsdPrefillParams& params_;
  SsdMemory& shared_;
  Ring<kStages> ring_;
  uint32_t turn_ = 0;  // phase of what the other warpgroup hands over
};

}  // namespace fovea::kernels::cuda
