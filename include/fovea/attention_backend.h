// SPDX-License-Identifier: Apache-2.0
// The interface of every attention implementation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "fovea/device.h"
#include "fovea/kv_cache.h"
#include "fovea/lse.h"
#include "fovea/tensor.h"
#include "fovea/thread_pool.h"

namespace fovea {

// Up-projection weights of one MLA layer, dense within a head. A GPU may read them before what is
// ahead in the stream has ended: what writes them is to be complete when forward() is called.
struct MlaWeights {
  DType dtype = DType::f32;    // of both
  const void* w_uk = nullptr;  // [q_heads, nope_dim, kv_lora_rank]: k_nope = w_uk * latent
  const void* w_uv = nullptr;  // [q_heads, v_dim, kv_lora_rank]: v = w_uv * latent
  // Elements between heads; 0: heads are dense too.
  int64_t w_uk_head_stride = 0, w_uv_head_stride = 0;
};

// Rotary positions (arXiv:2104.09864) of q and k. A pair (a, b) of a head becomes
// (a cos - b sin, b cos + a sin); every product and sum is rounded to f32 and the result to the
// spec's q_dtype, so all backends give the same bits.
struct RotaryTensors {
  const float* cos = nullptr;  // [max_positions, rotary_dim / 2]
  const float* sin = nullptr;  // as cos
  int32_t max_positions = 0;   // with spec.dual_chunk above its chunk_size
  int32_t rotary_dim = 0;    // leading values of a head (mla: of its rotary part) that rotate, even
  bool interleaved = false;  // value 2i is paired with 2i + 1; else i with i + rotary_dim / 2
  // [tokens], in [0, max_positions); on a GPU others count as 0. spec.dual_chunk: the batch's, any.
  const int32_t* positions = nullptr;
};

// Inputs of a linear layer, f32, dense. `mixed` goes through the causal convolution and SiLU, then
// splits into q, k, v (gated_delta_net: [q_heads*head_dim, q_heads*head_dim, kv_heads*head_dim_v])
// or x, B, C (mamba2: [kv_heads*head_dim_v, q_heads*head_dim, q_heads*head_dim]).
struct LinearTensors {
  const float* mixed = nullptr;        // [tokens, conv_dim]
  const float* conv_weight = nullptr;  // [conv_dim, conv_width]
  const float* conv_bias = nullptr;    // [conv_dim] or null
  const float* log_decay = nullptr;    // [tokens, kv_heads]: ln(alpha_t); mamba2: dt * A
  const float* beta = nullptr;         // [tokens, kv_heads]: write strength; mamba2: dt
  const float* skip = nullptr;         // mamba2: D [kv_heads], or null
  bool l2_normalise_qk = false;        // gated_delta_net
};

// What one layer hands to forward(), in memory of the backend's device: on a GPU 16-byte aligned,
// with strides that are multiples of 16 bytes. Rows are packed in batch order; every row of `out`
// that belongs to a live token is written, rows beyond BatchView::tokens are left untouched.
// Without q the call only stores k and v: that is how the cache of cross attention is filled, by a
// batch whose tokens are the encoder's.
struct LayerTensors {
  int32_t layer = 0;  // index inside the backend's pool
  // [tokens, q_heads, head_dim]. mla: absorbed [.., kv_lora_rank + rope_dim], or with mla_weights
  // [.., nope_dim + rope_dim]
  HeadRows q = {};
  HeadRows q_rope = {};  // mla: [tokens, q_heads, rope_dim] when q holds the rest only
  // As q, with spec.dual_chunk but without has_rope: q as rotated for keys of the chunk before, and
  // of older chunks. They share q_scale.
  HeadRows q_succ = {}, q_inter = {};
  HeadRows k = {};      // [tokens, kv_heads, head_dim]. mla: latent [tokens, 1, kv_lora_rank]
  HeadRows v = {};      // [tokens, kv_heads, head_dim_v]. mla: rotary key [tokens, 1, rope_dim]
  HeadRows out = {};    // [tokens, q_heads, head_dim_v]. mla with mla_weights: [.., v_dim]
  NaturalLse lse = {};  // [tokens, q_heads], without the sink; needs spec.needs_lse
  // Scales of an fp8 q: its values are q * q_scale[token * q_scale_token_stride + head *
  // q_scale_head_stride]. Null: 1. A stride of 0 shares a scale.
  const float* q_scale = nullptr;
  int64_t q_scale_token_stride = 0, q_scale_head_stride = 0;
  // Store k and v at out_slots before attending. False (or k absent): the layer reads what is
  // there, as layers that share another layer's cache do.
  bool save_kv = true;
  const float* sinks = nullptr;         // [q_heads], with spec.has_sinks
  const float* alibi_slopes = nullptr;  // [q_heads], with spec.has_alibi
  RotaryTensors rotary = {};            // with spec.has_rope; q is then overwritten
  MlaWeights mla_weights = {};          // mla with nope_dim > 0
  LinearTensors linear = {};            // gated_delta_net, mamba2: replaces q, k, v
};

// One implementation bound to one AttentionSpec and one pool. It owns no cache memory. Calls on one
// object must not overlap. On a GPU plan() and forward() only enqueue work and leave the backend's
// device current on the calling thread. A pass runs in stream order: give plan() and its forward()s
// one stream, or order the streams yourself.
class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;
  virtual std::string_view name() const = 0;
  virtual Device device() const { return {}; }  // where it runs
  // What it was created over, for who composes backends; null: neither, or it does not say.
  virtual const KvPool* kv() const { return nullptr; }
  virtual const StatePool* state() const { return nullptr; }

  // Exact upper bound over every batch within the limits. Throws Error{invalid_argument} naming a
  // limit that is out of range.
  virtual size_t workspace_bytes(const BatchLimits& limits) const = 0;

  // Fixes every buffer; addresses never change again and nothing is allocated later (`reference`
  // alone, being loops over plain vectors, allocates inside its kernels). An empty
  // workspace is allocated by the backend; otherwise it needs at least workspace_bytes(limits)
  // bytes of device() memory, 64-byte aligned, which outlive the backend, or
  // Error{workspace_too_small} names how many. Once more with other limits it begins anew: captured
  // passes are then void.
  virtual void reserve(const BatchLimits& limits, std::span<std::byte> workspace = {}) = 0;

  // Builds indices and splits the work. Once per forward pass; legal inside a graph capture. Throws
  // Error{invalid_argument} when the batch exceeds the limits or lacks an array the spec calls for,
  // or before reserve(); then there is no plan, not even the one before.
  virtual void plan(const BatchView& batch, Stream stream = nullptr) = 0;

  // Once per layer: stores k and v, attends, writes out and, when asked, lse. Throws
  // Error{invalid_argument} naming a tensor that is absent, misaligned or of another dtype, or
  // without a plan.
  virtual void forward(const LayerTensors& layer, Stream stream = nullptr) = 0;
};

// What a backend is built from. Exactly one of kv and state is set; the scopes ragged and encoder
// need neither.
struct BackendContext {
  AttentionSpec spec = {};
  KvPool* kv = nullptr;           // outlives the backend
  StatePool* state = nullptr;     // outlives the backend
  ThreadPool* threads = nullptr;  // outlives the backend; null on a GPU
  Device device = {};             // where it is to run; the pool must be there
};

}  // namespace fovea
