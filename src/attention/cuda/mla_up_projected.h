// SPDX-License-Identifier: Apache-2.0
// The up-projected form of MLA on a GPU: computes keys and values of every head from the latents,
// then runs plain ragged attention, for all heads or for some heads after the others. If the bounds
// of a pass show that all its tokens fit the buffers, they are computed at once. Otherwise the new
// tokens come first; the tokens before them follow in chunks of a bounded number of rows and are
// merged by their log-sum-exp.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "attention/cuda/cache.h"
#include "attention/cuda/mla_kernels.h"
#include "attention/cuda/mla_projection.h"
#include "attention/cuda/mla_up_projected_buffers.h"
#include "attention/mla_forms.h"
#include "fovea/select_backend.h"
#include "kernels/cuda/portable/merge_states/launch.h"
#include "kernels/cuda/portable/mla_prefill/launch.h"

namespace fovea {

// Returns true if requests within the limits can be up-projected.
bool serves_up_projected(const AttentionSpec& spec, const BatchLimits& limits);

// Buffers that both forms use; the up-projected form runs first.
struct MlaScratch {
  std::byte* queries = nullptr;  // [tokens, heads of the pass, nope_dim + rope_dim] at least
  std::byte* results = nullptr;  // [tokens, heads of the pass, v_dim] at least
};

class CudaUpProjectedMla {
 public:
  // Returns the kernels that the constructor takes from the store. The spec can_up_project().
  static std::vector<gpu::KernelVariant> variants(const MlaKernels& kernels,
                                                  const AttentionSpec& spec, DType stored,
                                                  const DeviceInfo& device);
  CudaUpProjectedMla(const MlaKernels& kernels, const AttentionSpec& spec, const KvCacheSpec& cache,
                     const DeviceInfo& device, gpu::KernelStore& store);
  void reserve(const BatchLimits& limits, const UpProjectedBuffers& buffers,
               const MlaScratch& scratch);

  // Returns how many tokens before new ones all requests of a pass can have together.
  int64_t max_context() const;
  // Launches the choice of every request's form. `bounds`: from bound_mla_forms() with
  // max_context(). `heads`: heads of each attend().
  void plan(const BatchView& batch, const MlaFormBounds& bounds, int32_t heads,
            gpu::Launcher launcher);
  // After plan() and the page table: finds those places of rows that are the same in every layer.
  // `cache`: any layer.
  void locate(const kernels::cuda::MlaDecodeTensors& cache, gpu::Launcher launcher) const;
  // Device arrays, [requests] and [tokens]: 1 if the request or token is up-projected.
  const uint8_t* requests() const { return buffers_.up_requests; }
  const uint8_t* tokens() const { return buffers_.up_tokens; }

  // Launches attention for the first heads of `tensors`, as many as planned, and for the requests
  // that are up-projected. Other rows of out and lse keep their values.
  void attend(const LayerTensors& tensors, const kernels::cuda::MlaDecodeTensors& cache,
              gpu::Launcher launcher);

 private:
  // Attention over up-projected rows: the new tokens, or a chunk.
  struct Part {
    std::unique_ptr<kernels::cuda::AttentionKernel> attention;
    kernels::cuda::SharedKeys shared_keys;
    // The planned pass:
    kernels::cuda::BatchParams batch{};
    kernels::cuda::ExpectedKeys keys;
    const int32_t* begin = nullptr;      // [requests] first rows
    const int32_t* live_rows = nullptr;  // [1] number of rows, on the device
    int32_t rows = 0;                    // at most
    int32_t heads = 0;  // heads with keys and values at a time, a divisor of the pass's heads
  };

  // The destination of a part's attention, for all heads of the pass.
  struct Result {
    HeadRows out;
    float* lse = nullptr;  // [tokens, heads]
  };

  // rows_for() returns how many rows fit with keys and values of `heads` heads. heads_for() returns
  // how many heads fit with `rows` rows, or with as many rows as fit at all.
  int32_t rows_for(int32_t heads) const;
  int32_t heads_for(int64_t rows) const;
  HeadRows joined_queries(const LayerTensors& tensors, gpu::Launcher launcher) const;
  // Returns the parameters for a part, or for the first chunk.
  kernels::cuda::MlaGatherParams gather_params(const Part& part,
                                               const kernels::cuda::MlaDecodeTensors& cache) const;
  // Returns true if locate() finds all places of the planned batch's rows.
  bool located() const { return at_once_ && copies_rotary_; }
  // Computes keys and values of the gathered rows and attends to them, some heads after the others.
  void attend_rows(const Part& part, const LayerTensors& tensors, const void* cache,
                   const HeadRows& q, const Result& result, gpu::Launcher launcher);
  void project(const Part& part, const MlaWeights& weights, const void* cache, bool first,
               gpu::Launcher launcher) const;
  // Orders a part's work: once a pass for new tokens and for a single chunk, whose lengths are
  // known then, and in every layer for several chunks, which share buffers.
  void plan_part(const Part& part, gpu::Launcher launcher) const;
  kernels::cuda::MlaChunk chunk() const;
  void run(const Part& part, const HeadRows& q, const Result& result, gpu::Launcher launcher);

  AttentionSpec spec_;
  KvCacheSpec cache_;
  kernels::cuda::MlaPrefillSteps steps_;
  kernels::cuda::MergeStates merge_;
  MlaProjection projection_;
  Part new_part_, chunk_part_;
  int32_t shared_key_dims_ = 0;  // as attention reads them
  bool gathers_;                 // the projection reads latents from their pages
  bool copies_rotary_;           // the projection copies rotary keys; otherwise steps_ does
  UpProjectedBuffers buffers_;
  MlaScratch scratch_;
  BatchView batch_;  // the planned one
  // The planned batch:
  int32_t heads_ = 0;
  bool at_once_ = false;  // one chunk has all its tokens
  int32_t chunks_ = 0;    // chunks of context, at most
};

}  // namespace fovea
