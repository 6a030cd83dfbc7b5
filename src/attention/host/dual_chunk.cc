// SPDX-License-Identifier: Apache-2.0
#include "attention/host/dual_chunk.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>

#include "attention/validate/layer.h"
#include "core/check.h"

namespace fovea {
namespace {

// Chunks are counted by the batch's positions. Rotations by other positions would belong to other
// distances.
void check_positions(const int32_t* rotary, const kernels::AttentionParams& batch) {
  for (int32_t request = 0; request < batch.requests; ++request) {
    const int32_t end = batch.q_indptr[request + 1], kv_len = batch.kv_lens[request];
    for (int32_t token = batch.q_indptr[request]; token < end; ++token) {
      check_argument(rotary[token] >= 0, "rotary.positions[{}] is {}, must not be negative", token,
                     rotary[token]);
      const int32_t position =
          batch.mask.positions ? batch.mask.positions[token] : kv_len - end + token;
      check_argument(kv_len == 0 || rotary[token] == position,  // without keys it sees none
                     "rotary.positions[{}] is {}, with dual_chunk must be the batch's, {}", token,
                     rotary[token], position);
    }
  }
}

}  // namespace

std::string describe_dual_chunk(const AttentionSpec& spec) {
  return fmt::format(
      "keys of a token's chunk of {}, of the chunk before and of older ones are three passes",
      spec.dual_chunk.length());
}

void HostDualChunk::carve(WorkspaceCarver& workspace, const HostShape& shape,
                          const HostKernels::Shape& kernel_shape, const BatchLimits& limits) {
  const AttentionSpec& spec = shape.spec;
  kernels_ = shape.kernels;
  shape_ = kernel_shape;
  chunks_ = spec.dual_chunk;
  const size_t bytes = kernels_->attention_workspace_bytes(shape_, limits);
  for (Pass& pass : passes_) pass.workspace = workspace.take_bytes(bytes);
  states_.carve(workspace, shape, shape_, kPasses, limits.max_tokens);
  if (!spec.has_rope) return;
  for (HeadRows* rows : {&q_succ_, &q_inter_}) {
    *rows = carve_rows(workspace, spec.q_dtype, limits.max_tokens, spec.q_heads, spec.head_dim);
  }
  positions_ = workspace.take<int32_t>(int64_t{kPasses} * limits.max_tokens);
}

kernels::AttentionParams HostDualChunk::params_of(const kernels::AttentionParams& batch,
                                                  int32_t pass) const {
  kernels::AttentionParams params = batch;
  params.mask.chunk = chunks_.length();
  params.chunks.nearest = pass;
  params.chunks.farthest = pass + 1 == kPasses ? std::numeric_limits<int32_t>::max() : pass;
  return params;
}

// Omits passes without keys: joining them would change no bit.
void HostDualChunk::plan(const kernels::AttentionParams& params) {
  int32_t longest = 1;
  for (int32_t i = 0; i < params.requests; ++i) longest = std::max(longest, params.kv_lens[i]);
  used_ = std::min(kPasses, (longest - 1) / chunks_.length() + 1);
  for (int32_t pass = 0; pass < used_; ++pass) {
    passes_[pass].schedule =
        kernels_->plan_attention(shape_, params_of(params, pass), passes_[pass].workspace);
  }
}

LayerTensors HostDualChunk::rotated(const LayerTensors& layer,
                                    const kernels::AttentionParams& batch,
                                    const HeadRows& rotated_k, ThreadPool& threads) const {
  check_positions(layer.rotary.positions, batch);
  const int32_t tokens = batch.q_indptr[batch.requests];
  const int64_t length = chunks_.length(), most = chunks_.chunk_size;
  int32_t* const own = positions_;
  int32_t* const succ = own + tokens;
  int32_t* const inter = succ + tokens;
  for (int32_t token = 0; token < tokens; ++token) {
    const int32_t position = layer.rotary.positions[token];
    own[token] = static_cast<int32_t>(position % length);
    succ[token] = static_cast<int32_t>(std::min(own[token] + length, most));
    inter[token] = static_cast<int32_t>(std::min(2 * length - 1, most));
  }
  LayerTensors turned = layer;
  const auto rotate = [&](const int32_t* positions, const HeadRows& from, const HeadRows& to,
                          int32_t heads) {
    RotaryTensors rotary = layer.rotary;
    rotary.positions = positions;
    kernels::rotate_heads({rotary, from, to, tokens, heads, shape_.head_dim}, threads);
  };
  if (layer.q) {
    turned.dual_chunk.q_succ = q_succ_;
    turned.dual_chunk.q_inter = q_inter_;
    rotate(succ, layer.q, turned.dual_chunk.q_succ, shape_.q_heads);
    rotate(inter, layer.q, turned.dual_chunk.q_inter, shape_.q_heads);
    rotate(own, layer.q, turned.q, shape_.q_heads);  // the last, in place
  }
  if (stores(layer)) {
    turned.k = rotated_k;
    rotate(own, layer.k, turned.k, shape_.kv_heads);
  }
  return turned;
}

void HostDualChunk::run(const kernels::AttentionParams& params, const HeadRows& q_succ,
                        const HeadRows& q_inter, ThreadPool& threads) const {
  const HeadRows queries[kPasses] = {params.q, q_succ, q_inter};
  for (int32_t pass = 0; pass < used_; ++pass) {
    kernels::AttentionParams part = params_of(params, pass);
    part.q = queries[pass];
    states_.run(pass, part, passes_[pass].schedule, threads);
  }
  states_.join(used_, params, threads);
}

}  // namespace fovea
