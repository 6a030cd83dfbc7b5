// SPDX-License-Identifier: Apache-2.0
#include "attention/host/mla.h"

#include <algorithm>

#include "attention/batch_mask.h"
#include "attention/host/mla_absorbed.h"
#include "attention/host/mla_up_projected.h"
#include "attention/host/pages.h"
#include "attention/row_views.h"
#include "attention/validate/layer.h"
#include "core/check.h"

namespace fovea {
namespace {

struct MlaBuffers {
  PageTable pages;
  HeadRows rotated_k;               // [max_tokens, 1, rope_dim], with has_rope
  int32_t* absorbed = nullptr;      // [max_requests] requests of the absorbed pass
  int32_t* up_projected = nullptr;  // [max_requests] the others
  int32_t* q_indptr = nullptr;      // [max_requests + 1] rows of the absorbed pass
  int32_t* kv_lens = nullptr;       // [max_requests]
  float* lse = nullptr;             // [max_tokens, heads] if passes compute some heads at a time
  HostAbsorbedMla absorbed_form;
  HostUpProjectedMla up_projected_form;
};

MlaBuffers carve_mla(WorkspaceCarver& workspace, const HostShape& shape, const BatchLimits& limits,
                     const MlaOptions& options, int32_t heads) {
  MlaBuffers buffers;
  buffers.pages = carve_page_table(workspace, limits, shape.cache.page_size);
  if (const AttentionSpec& spec = shape.spec; spec.has_rope) {
    buffers.rotated_k =
        carve_rows(workspace, spec.q_dtype, limits.max_tokens, 1, spec.mla.rope_dim);
  }
  buffers.absorbed = workspace.take<int32_t>(limits.max_requests);
  buffers.up_projected = workspace.take<int32_t>(limits.max_requests);
  buffers.q_indptr = workspace.take<int32_t>(int64_t{limits.max_requests} + 1);
  buffers.kv_lens = workspace.take<int32_t>(limits.max_requests);
  if (shape.spec.needs_lse && heads < shape.spec.q_heads) {
    buffers.lse = workspace.take<float>(int64_t{limits.max_tokens} * heads);
  }
  buffers.absorbed_form.carve(workspace, shape, limits, heads);
  if (can_up_project(shape.spec)) {
    buffers.up_projected_form.carve(workspace, shape, limits, options.chunk_rows, heads);
  }
  return buffers;
}

size_t bytes_with(const HostShape& shape, const BatchLimits& limits, const MlaOptions& options,
                  int32_t heads) {
  WorkspaceCarver counter(nullptr);
  carve_mla(counter, shape, limits, options, heads);
  return counter.bytes();
}

// Returns the heads of max_tokens tokens that fit the budget, or a quarter of it if everything else
// leaves less. Queries that come absorbed take no room.
int32_t affordable_heads(const HostShape& shape, const BatchLimits& limits,
                         const MlaOptions& options) {
  const int32_t q_heads = shape.spec.q_heads;
  if (shape.spec.mla.nope_dim == 0) return q_heads;
  const auto budget = static_cast<size_t>(limits.workspace_budget);
  const size_t allowed = std::max(budget, bytes_with(shape, limits, options, 1) + budget / 4);
  int32_t heads = q_heads;
  while (bytes_with(shape, limits, options, heads) > allowed && heads > 1) {
    heads = fewer_heads(q_heads, heads);
  }
  return heads;
}

class HostMla final : public HostBackend {
 public:
  HostMla(const HostKernels& kernels, const BackendContext& context, const MlaOptions& options)
      : HostBackend(kernels, context), options_(options) {}

 private:
  size_t count_bytes(const BatchLimits& limits) const override {
    return host_mla_workspace_bytes(shape(), limits, options_);
  }

  void carve(WorkspaceCarver& workspace, const BatchLimits& limits) override {
    max_tokens_ = limits.max_tokens;
    heads_ = affordable_heads(shape(), limits, options_);
    buffers_ = carve_mla(workspace, shape(), limits, options_, heads_);
  }

  void plan_batch(const BatchView& batch) override {
    build_batch_pages(batch, spec(), *pool(), buffers_.pages);
    choose_forms(batch);
    AbsorbedBatch absorbed;
    absorbed.requests = {buffers_.absorbed, static_cast<size_t>(absorbed_count_)};
    absorbed.whole_batch = up_projected_count_ == 0;
    absorbed.pages = buffers_.pages;
    if (absorbed.whole_batch) {
      absorbed.tokens = batch.tokens;
      absorbed.q_indptr = batch.q_indptr.data();
      absorbed.kv_lens = batch.kv_lens.data();
    } else {
      pack_absorbed(batch);
      absorbed.tokens = buffers_.q_indptr[absorbed_count_];
      absorbed.q_indptr = buffers_.q_indptr;
      absorbed.kv_lens = buffers_.kv_lens;
    }
    pass_heads_ = heads_of_pass(spec().q_heads, heads_, max_tokens_, batch.tokens);
    const HostShape pass = with_heads(shape(), pass_heads_);
    buffers_.absorbed_form.plan(pass, batch, absorbed, batch_mask(batch, spec()));
    buffers_.up_projected_form.plan(pass);
  }

  void choose_forms(const BatchView& batch) {
    absorbed_count_ = up_projected_count_ = 0;
    for (int32_t request = 0; request < batch.requests; ++request) {
      const int32_t q_len = batch.q_indptr[request + 1] - batch.q_indptr[request];
      if (form_of(q_len, batch.kv_lens[request]) == MlaForm::up_projected) {
        buffers_.up_projected[up_projected_count_++] = request;
      } else {
        buffers_.absorbed[absorbed_count_++] = request;
      }
    }
  }

  MlaForm form_of(int32_t q_len, int32_t kv_len) const {
    if (kv_len == 0 || !can_up_project(spec())) return MlaForm::absorbed;
    return options_.form != MlaForm::automatic ? options_.form
                                               : choose_mla_form(spec(), q_len, kv_len);
  }

  // Moves the absorbed requests to the front: lengths, rows of q and rows of the page table.
  void pack_absorbed(const BatchView& batch) {
    const PageTable& pages = buffers_.pages;
    buffers_.q_indptr[0] = 0;
    for (int32_t i = 0; i < absorbed_count_; ++i) {
      const int32_t request = buffers_.absorbed[i];
      buffers_.q_indptr[i + 1] =
          buffers_.q_indptr[i] + batch.q_indptr[request + 1] - batch.q_indptr[request];
      buffers_.kv_lens[i] = batch.kv_lens[request];
      if (i == request) continue;
      std::copy_n(pages.table + request * pages.stride, pages.stride,
                  pages.table + i * pages.stride);
    }
  }

  // Rotates the rotary part of q in place; returns the layer with its key rotated in the workspace.
  LayerTensors rotated(LayerTensors layer) {
    const auto rotate = [&](const HeadRows& from, const HeadRows& to, int32_t heads) {
      kernels::rotate_heads({layer.rotary, from, to, batch().tokens, heads, spec().mla.rope_dim},
                            threads());
    };
    const HeadRows q = rotary_queries(layer, spec());
    if (q) rotate(q, q, spec().q_heads);
    if (stores(layer)) {
      rotate(layer.mla.k_rope, buffers_.rotated_k, 1);
      layer.mla.k_rope = buffers_.rotated_k;
    }
    return layer;
  }

  void run_layer(const LayerTensors& given) override {
    const LayerTensors layer = spec().has_rope ? rotated(given) : given;
    const KvLayerView cache = pool()->layer(layer.layer);
    store(layer, cache);
    if (!layer.q) return;
    for (int32_t head = 0; head < spec().q_heads; head += pass_heads_) {
      LayerTensors own = from_head(layer, head, spec());
      const bool collects = layer.lse && pass_heads_ < spec().q_heads;
      if (collects) own.lse = NaturalLse(buffers_.lse);
      run_heads(own, cache);
      if (collects) place_lse(layer.lse.data + head);
    }
  }

  void run_heads(const LayerTensors& layer, const KvLayerView& cache) {
    buffers_.absorbed_form.run(layer, cache, threads());
    for (int32_t i = 0; i < up_projected_count_; ++i) {
      buffers_.up_projected_form.run(batch(), buffers_.up_projected[i], layer, cache, threads());
    }
  }

  // Copies the LSE of some heads into the rows of all heads.
  void place_lse(float* lse) const {
    for (int32_t token = 0; token < batch().tokens; ++token) {
      std::copy_n(buffers_.lse + int64_t{token} * pass_heads_, pass_heads_,
                  lse + int64_t{token} * spec().q_heads);
    }
  }

  MlaOptions options_;
  MlaBuffers buffers_;
  int32_t absorbed_count_ = 0, up_projected_count_ = 0;
  // Passes of max_tokens_ tokens are computed heads_ heads at a time; the planned one: pass_heads_.
  int32_t max_tokens_ = 0, heads_ = 0, pass_heads_ = 0;
};

}  // namespace

size_t host_mla_workspace_bytes(const HostShape& shape, const BatchLimits& limits,
                                const MlaOptions& options) {
  return bytes_with(shape, limits, options, affordable_heads(shape, limits, options));
}

std::unique_ptr<AttentionBackend> make_host_mla(const HostKernels& kernels,
                                                const BackendContext& context,
                                                const MlaOptions& options) {
  check_argument(options.chunk_rows > 0, "chunk_rows is {}, must be positive", options.chunk_rows);
  return std::make_unique<HostMla>(kernels, context, options);
}

}  // namespace fovea
