// SPDX-License-Identifier: Apache-2.0
// The up-projected form of MLA on a GPU: keys and values of every head from the latents, then plain
// ragged attention, for all heads or a few of them after the other: over all tokens of a pass at
// once where its bounds say that they fit the buffers. Else its new tokens come first; the tokens
// before them follow in chunks of a bounded number of rows, whatever the context, and are added by
// their log-sum-exp.
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

// Whether requests within the limits can be up-projected.
bool serves_up_projected(const AttentionSpec& spec, const BatchLimits& limits);

// What the two forms share of the workspace; the up-projected one goes first.
struct MlaScratch {
  std::byte* queries = nullptr;  // [tokens, heads of the pass, nope_dim + rope_dim] at least
  std::byte* results = nullptr;  // [tokens, heads of the pass, v_dim] at least
};

class MlaPrefill {
 public:
  // What the constructor takes from the store. Spec: can_up_project().
  static std::vector<gpu::KernelVariant> variants(const MlaKernels& kernels,
                                                  const AttentionSpec& spec, DType stored,
                                                  const DeviceInfo& device);
  MlaPrefill(const MlaKernels& kernels, const AttentionSpec& spec, const KvCacheSpec& cache,
             const DeviceInfo& device, gpu::KernelStore& store);
  void reserve(const BatchLimits& limits, const MlaPrefillBuffers& buffers,
               const MlaScratch& scratch);

  // Tokens before new ones, of all requests of a pass, that it can serve.
  int64_t max_context() const;
  // Enqueues the choice of every request's form. `bounds`: of bound_mla_forms() with max_context().
  // `heads`: that each attend() is for.
  void plan(const BatchView& batch, const MlaFormBounds& bounds, int32_t heads, Stream stream);
  // Behind plan() and the page table: what of the rows' places holds for every layer. `cache`: of
  // any layer.
  void locate(const kernels::cuda::MlaDecodeTensors& cache, Stream stream) const;
  // [requests] and [tokens] on the device: 1 where the form is this one.
  const uint8_t* requests() const { return buffers_.up_requests; }
  const uint8_t* tokens() const { return buffers_.up_tokens; }

  // Enqueues the attention of the planned number of heads, the first of `tensors`, of the requests
  // that are up-projected; other rows of out and lse stay as they are.
  void attend(const LayerTensors& tensors, const kernels::cuda::MlaDecodeTensors& cache,
              Stream stream);

 private:
  // Attention over up-projected rows: of the new tokens, or of a chunk.
  struct Part {
    std::unique_ptr<kernels::cuda::AttentionKernel> attention;
    // Of the planned pass:
    kernels::cuda::BatchParams batch{};
    const int32_t* begin = nullptr;      // [requests] first rows
    const int32_t* live_rows = nullptr;  // [1] how many rows there are, on the device
    int32_t rows = 0;                    // at most
    int32_t heads = 0;  // whose keys and values there are at a time, a divisor of the pass's
  };

  // Where a part's attention goes: all heads of the pass.
  struct Result {
    HeadRows out;
    float* lse = nullptr;  // [tokens, heads]
  };

  // How many rows there is room for with keys and values of so many heads; how many heads as many
  // rows leave room for, or, if there is not, as all rows that fit do.
  int32_t rows_for(int32_t heads) const;
  int32_t heads_for(int64_t rows) const;
  HeadRows joined_queries(const LayerTensors& tensors, Stream stream) const;
  // Of a part; of chunks the first.
  kernels::cuda::MlaGatherParams gather_params(const Part& part,
                                               const kernels::cuda::MlaDecodeTensors& cache) const;
  // Of the planned batch: locate() says all there is to say.
  bool located() const { return at_once_ && copies_rotary_; }
  // Keys and values of the gathered rows, and attention over them, some heads after the others.
  void attend_rows(const Part& part, const LayerTensors& tensors, const void* cache,
                   const HeadRows& q, const Result& result, Stream stream);
  void project(const Part& part, const MlaWeights& weights, const void* cache, bool first,
               Stream stream) const;
  // Orders a part's work: of new tokens and a single chunk once a pass, as the lengths of both are
  // known then; of several chunks, which share buffers, in every layer.
  void plan_part(const Part& part, Stream stream) const;
  kernels::cuda::MlaChunk chunk() const;
  void run(const Part& part, const HeadRows& q, const Result& result, Stream stream);

  AttentionSpec spec_;
  KvCacheSpec cache_;
  kernels::cuda::MlaPrefillSteps steps_;
  kernels::cuda::MergeStates merge_;
  MlaProjection projection_;
  Part new_part_, chunk_part_;
  int32_t shared_key_dims_ = 0;  // as attention reads them
  bool gathers_;                 // latents are read in their pages
  bool copies_rotary_;  // so are rotary keys, which are copied then; else steps_ gathers them
  MlaPrefillBuffers buffers_;
  MlaScratch scratch_;
  BatchView batch_;    // the planned one
  int32_t heads_ = 0;  // of the planned pass
  // Of the planned batch: whether one chunk has all its tokens; chunks of context, at most.
  bool at_once_ = false;
  int32_t chunks_ = 0;
};

}  // namespace fovea
