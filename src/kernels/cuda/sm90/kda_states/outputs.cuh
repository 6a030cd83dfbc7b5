// SPDX-License-Identifier: Apache-2.0
// The warpgroup of outputs, with tokens in rows: O = read S^T + scores U^T, by the state before the
// chunk and the new values, which the other warpgroup hands over.
#pragma once

#include "kernels/cuda/sm90/kda_states/config.cuh"

namespace fovea::kernels::cuda {

template <Type kType>
class OutputWalk {
 public:
  __device__ __forceinline__ explicit OutputWalk(WalkMemory& shared) : shared_(shared) {}

  __device__ __forceinline__ void run(const Walk& walk) {
#pragma unroll 1
    for (int n = 0; n < walk.chunks; ++n, ring_.advance(), turn_ ^= 1) {
      QueryStage& stage = shared_.queries[ring_.stage];
      shared_.queries_full[ring_.stage].wait(ring_.phase);
      float out[32];
      shared_.state.full.wait(turn_);
      products_begin();
      multiply_rows<kType>(out, stage.terms.read, shared_.state.rows);
      products_commit();
      products_wait<0>();
      products_landed(out);
      release(shared_.state.empty);
      shared_.values.full.wait(turn_);
      products_begin();
#pragma unroll
      for (int step = 0; step < kChunkTokens / 16; ++step) {
        multiply_rows<kType>(out, stage.terms.scores, shared_.values.rows, step, true);
      }
      products_commit();
      products_wait<0>();
      products_landed(out);
      release(shared_.values.empty);
      named_barrier_wait(2, kWarpgroupThreads);  // all products have read the stage
      keep_outputs(out, stage.out);
      fence_async_proxy();  // copies follow
      release(shared_.outputs_full[ring_.stage]);
    }
  }

 private:
  WalkMemory& shared_;
  Ring<kQueryStages> ring_;
  uint32_t turn_ = 0;  // phase of what the other warpgroup hands over
};

// The warps that store outputs, because stores wait long for each other. `part` numbers them.
class StoreWalk {
 public:
  __device__ __forceinline__ StoreWalk(const KdaPrefillParams& params, WalkMemory& shared, int part)
      : params_(params), shared_(shared), part_(part) {}

  __device__ __forceinline__ void run(const Walk& walk) {
    constexpr int kRows = kChunkTokens / kStoringWarps;
#pragma unroll 1
    for (int n = 0; n < walk.chunks; ++n, ring_.advance()) {
      const int first = n * kChunkTokens;
      shared_.outputs_full[ring_.stage].wait(ring_.phase);
      store_kept<kRows>(shared_.queries[ring_.stage].out, part_ * kRows, walk.out(params_, first),
                        params_.out_token_stride, walk.tokens - first);
      release(shared_.queries_empty[ring_.stage]);
    }
  }

 private:
  const KdaPrefillParams& params_;
  WalkMemory& shared_;
  int part_;
  Ring<kQueryStages> ring_;
};

}  // namespace fovea::kernels::cuda
