// SPDX-License-Identifier: Apache-2.0
// The warpgroup of outputs, with tokens in rows: O = read Q S^T + scores U^T, by the state before
// the chunk and the new values, which the other warpgroup hands over.
#pragma once

#include "kernels/cuda/sm90/gdn_states/config.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
class OutputWalk {
 public:
  __device__ __forceinline__ OutputWalk(const GdnPrefillParams& params, WalkMemory& shared,
                                        const Walk& walk)
      : params_(params), shared_(shared), walk_(walk) {}

  __device__ __forceinline__ void run() {
    Ring<kStages> ring;
#pragma unroll 1
    for (int n = 0; n < walk_.chunks; ++n, ring.advance()) {
      Stage& stage = shared_.stages[ring.stage];
      const uint32_t phase = n % 2;
      shared_.full[ring.stage].wait(ring.phase);
      const Place place;
      const float read[2] = {stage.terms.read[place.row], stage.terms.read[place.row + 8]};
      float out[32];
      shared_.state.full.wait(phase);
      products_begin();
#pragma unroll
      for (int step = 0; step < kGdnDim / 16; ++step) {
        multiply(out, stage.q[step / 4], shared_.state.rows[step / 4], step % 4, step > 0);
      }
      products_commit();
      products_wait<0>();
      products_landed(out);
      release(shared_.state.empty);
#pragma unroll
      for (int i = 0; i < 32; ++i) out[i] *= read[i % 4 / 2];
      shared_.values.full.wait(phase);
      products_begin();
#pragma unroll
      for (int step = 0; step < kGdnChunk / 16; ++step) {
        multiply(out, stage.terms.scores, shared_.values.rows, step, true);
      }
      products_commit();
      products_wait<0>();
      products_landed(out);
      release(shared_.values.empty);
      release(shared_.empty[ring.stage]);
      store(out, n * kGdnChunk);
    }
  }

 private:
  // to = a b^T for 16 of the summed columns, or added to it.
  __device__ __forceinline__ static void multiply(float (&to)[32], const Tile& a, const Tile& b,
                                                  int step, bool add) {
    Product<kBlockValues>::template run<kType, false>(
        to, moved(rows_descriptor(shared_address(a)), step * 32),
        moved(rows_descriptor(shared_address(b)), step * 32), add);
  }

  // Stores the outputs of a chunk whose first token is `first` of the request: each warp its 16
  // tokens, through shared memory.
  __device__ __forceinline__ void store(const float (&out)[32], int first) const {
    const Place place;
    uint32_t rounded[16];
    round<kType>(rounded, out);
    __syncwarp();  // the last outputs have been read
    store_rounded(&shared_.out, rounded);
    __syncwarp();
    constexpr int kRowChunks = kBlockValues / 8;
    constexpr int kRows = 32 / kRowChunks;  // rows that a warp stores at once
    const int chunk = place.lane % kRowChunks;
    uint16_t* const to = params_.out + (walk_.begin + first) * params_.out_token_stride +
                         walk_.head * kGdnDim + walk_.first_value + chunk * 8;
#pragma unroll
    for (int i = 0; i < 16; i += kRows) {
      const int token = place.warp * 16 + i + place.lane / kRowChunks;
      if (first + token < walk_.tokens) {
        *reinterpret_cast<uint4*>(to + token * params_.out_token_stride) =
            *reinterpret_cast<const uint4*>(swizzled(shared_.out, token, chunk));
      }
    }
  }

  const GdnPrefillParams& params_;
  WalkMemory& shared_;
  const Walk& walk_;
};

}  // namespace fovea::kernels::cuda
