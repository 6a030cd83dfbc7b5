// SPDX-License-Identifier: Apache-2.0
// The up-projected form of MLA on a GPU: keys and values of every head from the latents, then plain
// ragged attention: over all tokens of a pass at once where its bounds say that they fit the
// buffers. Else its new tokens come first; the tokens before them follow in chunks of a bounded
// number of rows, whatever the context, and are added by their log-sum-exp.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "attention/backends/cuda_cache.h"
#include "attention/backends/mla_forms.h"
#include "attention/backends/mla_kernels.h"
#include "attention/backends/mla_projection.h"
#include "fovea/select_backend.h"
#include "kernels/cuda/common/mla_prefill_params.h"

namespace fovea {

// Rows of latents that are up-projected at a time in batches within the limits: all tokens of a
// pass, but no more than all its new ones, `chunk_rows`, and, for 0, 4096 or as many as keep them
// with their keys and values within 736 MB, whichever is most.
int32_t mla_prefill_rows(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                         const DeviceInfo& device, const BatchLimits& limits,
                         int32_t chunk_rows = 0);
// Whether requests within the limits can be up-projected.
bool serves_up_projected(const AttentionSpec& spec, const BatchLimits& limits);

struct MlaPrefillBuffers {
  int32_t rows = 0;  // of latents, keys and values
  // [rows, kv_lora_rank + rope_dim] latents and rotary keys; with offsets, where latents are read
  // in their pages, [rows, rope_dim].
  std::byte* gathered = nullptr;
  int64_t* offsets = nullptr;   // [rows]
  std::byte* keys = nullptr;    // [rows, q_heads, nope_dim], or with a rotary key for each
  std::byte* values = nullptr;  // [rows, q_heads, v_dim]
  float* lse = nullptr;         // [max_tokens, q_heads]
  float* part_lse = nullptr;    // [max_tokens, q_heads]
  std::array<std::byte*, 2> attention{};  // of MlaKernels::attention: new tokens, chunks
  uint8_t* up_requests = nullptr;         // [max_requests]
  uint8_t* up_tokens = nullptr;           // [max_tokens]
  int32_t* new_lens = nullptr;            // [max_requests]
  int32_t* row_indptr = nullptr;          // [max_requests + 1]
  int32_t* live_rows = nullptr;           // [1]
  int32_t* chunk_begin = nullptr;         // [max_requests]
  int32_t* chunk_lens = nullptr;          // [max_requests]
  int32_t* chunk_indptr = nullptr;        // [max_requests + 1]
};

// What the two forms share of the workspace; the up-projected one goes first.
struct MlaScratch {
  std::byte* queries = nullptr;  // [max_tokens, q_heads, nope_dim + rope_dim] at least
  std::byte* results = nullptr;  // [max_tokens, q_heads, v_dim] at least
};

class MlaPrefill {
 public:
  // What the constructor takes from the store. Spec: can_up_project().
  static std::vector<gpu::KernelVariant> variants(const MlaKernels& kernels,
                                                  const AttentionSpec& spec, DType stored,
                                                  const DeviceInfo& device);
  // Of limits that serve_up_projected.
  static MlaPrefillBuffers carve(WorkspaceCarver& workspace, const MlaKernels& kernels,
                                 const AttentionSpec& spec, DType stored, const DeviceInfo& device,
                                 const BatchLimits& limits, int32_t chunk_rows);

  MlaPrefill(const MlaKernels& kernels, const AttentionSpec& spec, const KvCacheSpec& cache,
             const DeviceInfo& device, gpu::KernelStore& store);
  void reserve(const BatchLimits& limits, const MlaPrefillBuffers& buffers,
               const MlaScratch& scratch);

  // Tokens before new ones, of all requests of a pass, that it can serve.
  int64_t max_context() const;
  // Enqueues the choice of every request's form. `bounds`: of bound_mla_forms() with max_context().
  void plan(const BatchView& batch, const MlaFormBounds& bounds, Stream stream);
  // [requests] and [tokens] on the device: 1 where the form is this one.
  const uint8_t* requests() const { return buffers_.up_requests; }
  const uint8_t* tokens() const { return buffers_.up_tokens; }

  // Enqueues the layer's attention of the requests that are up-projected. Rows of other requests in
  // out and lse may be written too, with nothing of use.
  void attend(const LayerTensors& tensors, const kernels::cuda::MlaDecodeTensors& cache,
              Stream stream);

 private:
  // Attention over up-projected rows: of the new tokens, or of a chunk.
  struct Part {
    std::unique_ptr<kernels::cuda::AttentionKernel> attention;
    kernels::cuda::BatchParams batch{};  // of the planned pass
    const int32_t* begin = nullptr;      // [requests] first rows
  };

  HeadRows joined_queries(const LayerTensors& tensors, Stream stream) const;
  void project(const MlaWeights& given, const kernels::cuda::MlaDecodeTensors& cache,
               const int32_t* live_rows, int32_t rows, Stream stream) const;
  // Orders a part's work: of new tokens and a single chunk once a pass, as the lengths of both are
  // known then; of several chunks, which share buffers, in every layer.
  void plan_part(const Part& part, Stream stream) const;
  kernels::cuda::MlaChunk chunk() const;
  void run(const Part& part, const HeadRows& q, const HeadRows& out, float* lse, int32_t rows,
           Stream stream);

  AttentionSpec spec_;
  KvCacheSpec cache_;
  kernels::cuda::Kernel forms_, gather_, add_, join_;
  MlaProjection projection_;
  Part new_part_, chunk_part_;
  int32_t shared_key_dims_ = 0;  // as attention reads them
  bool gathers_;                 // latents are read in their pages
  MlaPrefillBuffers buffers_;
  MlaScratch scratch_;
  BatchLimits limits_;
  BatchView batch_;  // the planned one
  // Of the planned batch: whether one chunk has all its tokens; chunks of context, at most.
  bool at_once_ = false;
  int32_t chunks_ = 0;
};

}  // namespace fovea
