// SPDX-License-Identifier: Apache-2.0
// The interface of every attention implementation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "fovea/api.h"
#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "fovea/device.h"
#include "fovea/kv_cache.h"
#include "fovea/lse.h"
#include "fovea/tensor.h"
#include "fovea/thread_pool.h"

namespace FOVEA_API fovea {

// Up-projection weights of one MLA layer, dense within a head. On a GPU the weights must be
// complete when forward() is called: kernels may read them before preceding work in the stream has
// ended.
struct MlaWeights {
  DType dtype = DType::f32;    // type of both arrays
  const void* w_uk = nullptr;  // [q_heads, nope_dim, kv_lora_rank]: k_nope = w_uk * latent
  const void* w_uv = nullptr;  // [q_heads, v_dim, kv_lora_rank]: v = w_uv * latent
  // Elements between heads; 0: heads are dense too.
  int64_t w_uk_head_stride = 0, w_uv_head_stride = 0;
};

// Tensors of MLA layers. Such layers leave LayerTensors::k and v absent: `latent` and `k_rope` are
// what the cache stores.
struct MlaTensors {
  HeadRows latent = {};     // [tokens, 1, kv_lora_rank]
  HeadRows k_rope = {};     // [tokens, 1, rope_dim] the rotary key
  HeadRows q_rope = {};     // [tokens, q_heads, rope_dim], or absent: q holds it after its own part
  MlaWeights weights = {};  // with nope_dim > 0
};

// RMSNorm (arXiv:1910.07467) of each head: x / sqrt(mean(x^2) + epsilon) * weight.
struct HeadNorm {
  const float* weight = nullptr;  // [head_dim]; null: no norm
  float epsilon = 0;
  bool plus_one = false;  // times (1 + weight)
};

// Rotary positions (arXiv:2104.09864) of q and k. A pair (a, b) of a head becomes
// (a cos - b sin, b cos + a sin). Every product and sum is rounded to f32 and the result to the
// spec's q_dtype, so all backends give the same bits, but for the norms before the rotation.
struct RotaryTensors {
  const float* cos = nullptr;  // [max_positions, rotary_dim / 2]
  const float* sin = nullptr;  // [max_positions, rotary_dim / 2]
  int32_t max_positions = 0;   // with spec.dual_chunk: more than its chunk_size
  int32_t rotary_dim = 0;    // leading values of a head that rotate, even; mla: of its rotary part
  bool interleaved = false;  // pairs (2i, 2i + 1); else (i, i + rotary_dim / 2)
  // [tokens], in [0, max_positions); a GPU takes other values as 0. With spec.dual_chunk these are
  // the positions of the batch, without an upper limit.
  const int32_t* positions = nullptr;
  // Norms of q and k before they rotate, in f32: heads are rounded once, after the rotation. Kind
  // mha, without spec.dual_chunk.
  HeadNorm q_norm = {}, k_norm = {};
};

// Further queries of dual chunk attention, of the same shape, type and scales as q. Layers with
// has_rope leave both absent: forward() makes them.
struct DualChunkQueries {
  HeadRows q_succ = {};   // q as rotated for keys of the chunk before
  HeadRows q_inter = {};  // q as rotated for keys of older chunks
};

// Inputs of the score changes that ScoreSpec names.
struct ScoreTensors {
  const float* sinks = nullptr;         // [q_heads], with has_sinks
  const float* alibi_slopes = nullptr;  // [q_heads], with has_alibi
};

// Inputs of a linear layer, f32 and dense; they replace q, k and v. `mixed` goes through the causal
// convolution and SiLU, then splits into q, k, v ([key_heads * key_dim, key_heads * key_dim,
// value_heads * value_dim]) or x, B, C (Mamba: [value_heads * value_dim, key_heads * key_dim,
// key_heads * key_dim]). With S the state of a head, whose rows are values:
//   gated_delta_net, kda  S = S D (I - beta k k^T) + beta v k^T, out = softmax_scale * S q
//   mamba1, mamba2        S = S D + dt x B^T, out = S C + skip * x
//   lightning             S = S D + v k^T, out = softmax_scale * S q
// where D is e^log_decay: a factor of the token and head; kda: of each column; lightning: of the
// head; mamba1: e^(dt A), a factor of the token, head and column.
//
// Where convolves_alone(), a call with conv_weight writes the convolution of `mixed` [tokens,
// value_heads * value_dim] to `out` and takes no other tensor. Without conv_weight a call of kind
// mamba1 computes the scan. With conv_width above 0 each layer makes both calls in a pass, the
// convolution first.
struct LinearTensors {
  const float* mixed = nullptr;        // [tokens, conv_dim]
  const float* conv_weight = nullptr;  // [conv_dim, conv_width]
  const float* conv_bias = nullptr;    // [conv_dim] or null
  // [tokens, value_heads]; mamba2: dt * A. kda: [tokens, value_heads, key_dim], lower bounds of the
  // model applied. lightning: [value_heads]. mamba1: A [value_heads, key_dim].
  const float* log_decay = nullptr;
  const float* beta = nullptr;   // [tokens, value_heads]; Mamba: dt, positive. lightning: null
  const float* skip = nullptr;   // Mamba: D [value_heads], or null
  bool l2_normalise_qk = false;  // gated_delta_net, kda
  bool plain_conv = false;       // short_conv: no SiLU after the convolution
};

// The tensors that one layer passes to forward(), in memory of the backend's device. On a GPU every
// address is a multiple of 16 bytes, and so is every stride. Rows are packed in batch order.
// forward() writes every row of `out` that belongs to a token of the batch and leaves later rows
// untouched.
//
// Without q the call only stores k and v. The cache of cross attention is filled in this way, by a
// batch whose tokens are the encoder's.
struct LayerTensors {
  int32_t layer = 0;  // index inside the backend's pool
  // [tokens, q_heads, head_dim]. mla: absorbed [.., kv_lora_rank + rope_dim], or with weights
  // [.., nope_dim + rope_dim]; without the rope_dim values if mla.q_rope holds them.
  HeadRows q = {};
  HeadRows k = {};          // [tokens, kv_heads, head_dim]
  HeadRows v = {};          // [tokens, kv_heads, head_dim_v]
  HeadRows out = {};        // [tokens, q_heads, head_dim_v]; mla: v_dim values, or kv_lora_rank;
                            // linear kinds: f32 [tokens, value_heads, value_dim]
  NaturalLse lse = {};      // [tokens, q_heads], without the sink; needs spec.needs_lse
  QueryScale q_scale = {};  // with an fp8 q
  // Store k and v (mla: latent and k_rope) at out_slots before attending. If false, or if they are
  // absent, the layer reads what the cache holds, as layers that share another layer's cache do.
  bool save_kv = true;

  ScoreTensors scores = {};
  RotaryTensors rotary = {};         // with spec.has_rope; forward() then overwrites q
  DualChunkQueries dual_chunk = {};  // with spec.dual_chunk, without has_rope
  MlaTensors mla = {};               // kind mla
  LinearTensors linear = {};         // linear kinds
};

// One implementation, bound to one AttentionSpec and one pool. It owns no cache memory. Calls on
// one object must not overlap. On a GPU, plan() and forward() only enqueue work, and they leave the
// backend's device current on the calling thread. A pass runs in stream order: give plan() and its
// forward() calls one stream, or order the streams yourself.
class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;
  virtual std::string_view name() const = 0;
  virtual Device device() const { return {}; }
  // The pool that the backend was created over, for compositions. Null: it has none or does not
  // report it.
  virtual const KvPool* kv() const { return nullptr; }
  virtual const StatePool* state() const { return nullptr; }

  // Returns the exact maximum over all batches within the limits, in bytes. Throws
  // Error{invalid_argument} naming a limit that is out of range.
  virtual size_t workspace_bytes(const BatchLimits& limits) const = 0;

  // Fixes every buffer. Addresses do not change afterwards and no later call allocates memory
  // (except `reference`, whose kernels use vectors). If `workspace` is empty, the backend allocates
  // its own; otherwise it must be workspace_bytes(limits) bytes or more of device() memory, 64-byte
  // aligned, and must outlive the backend; Error{workspace_too_small} names the bytes needed. May
  // be called again with other limits; this invalidates captured graphs and the plan.
  virtual void reserve(const BatchLimits& limits, std::span<std::byte> workspace = {}) = 0;

  // Builds indices and divides the work, once per forward pass. Legal inside a graph capture.
  // Throws Error{invalid_argument} if the batch exceeds the limits, lacks an array that the spec
  // needs or has one that is too short, or if nothing is reserved. After an error there is no plan,
  // not even the previous one.
  virtual void plan(const BatchView& batch, Stream stream = nullptr) = 0;

  // Runs one layer of the planned batch: stores k and v, attends, writes `out` and, if given,
  // `lse`. Throws Error{invalid_argument} naming a tensor that is absent, misaligned or of another
  // dtype, or if there is no plan.
  virtual void forward(const LayerTensors& layer, Stream stream = nullptr) = 0;
};

// The objects that a backend is built from. Softmax kinds need `kv`, linear kinds `state`; the
// scopes ragged and encoder need neither. The pools and the threads must outlive the backend.
struct BackendContext {
  AttentionSpec spec = {};
  KvPool* kv = nullptr;
  StatePool* state = nullptr;
  ThreadPool* threads = nullptr;  // null on a GPU
  Device device = {};             // where the backend runs; its pool must be there
};

}  // namespace fovea
