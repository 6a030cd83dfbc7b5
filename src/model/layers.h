// SPDX-License-Identifier: Apache-2.0
// The parts decoder layers are made of: norms, softmax attention over a backend, gated MLPs and
// mixtures of experts. An architecture puts them together and adds what only it has.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fovea/attention_backend.h"
#include "kernels/layer_ops.h"
#include "model/weights.h"

namespace fovea {

// Hands out the scratch of one block, front to back. Without memory it only counts.
class Arena {
 public:
  Arena() = default;
  explicit Arena(std::span<std::byte> memory) : memory_(memory) {}

  float* floats(int64_t count) { return reinterpret_cast<float*>(take(count)); }
  int32_t* ints(int64_t count) { return reinterpret_cast<int32_t*>(take(count)); }
  size_t used() const { return used_; }

 private:
  std::byte* take(int64_t count);  // of 4 bytes each, 64-byte aligned

  std::span<std::byte> memory_;
  size_t used_ = 0;
};

// One forward pass, as a block sees it.
struct Pass {
  std::span<AttentionBackend* const> backends;  // one per layer group
  const int32_t* positions = nullptr;           // [rows]
  int64_t rows = 0;
  ThreadPool* threads = nullptr;
  Arena arena;  // fresh for every block
};

// One residual branch of a layer.
class Block {
 public:
  virtual ~Block() = default;
  // out [rows, hidden] = f(x [rows, hidden]), both dense and distinct. x may be overwritten.
  virtual void forward(Pass& pass, float* x, float* out) const = 0;
  // Takes from the arena what forward() takes for `rows` rows.
  virtual void take_scratch(Arena& arena, int64_t rows) const = 0;
};

// RMSNorm over the last dimension.
struct Norm {
  std::vector<float> weight;  // empty: none
  float epsilon = 0;
  bool plus_one = false;  // times (1 + weight)

  explicit operator bool() const { return !weight.empty(); }
  void apply(kernels::HeadView x, kernels::HeadView out, int64_t rows, int32_t heads,
             ThreadPool& threads) const;
};

// What rotates q and k. The table is shared by all layers of a model.
struct Rotary {
  std::shared_ptr<const kernels::RopeTable> table;  // null: no positions in this layer
  kernels::RopeLayout layout = kernels::RopeLayout::half_split;

  void apply(const Pass& pass, kernels::HeadView x, int32_t heads) const;
};

inline HeadRows as_rows(const kernels::HeadView& view) {
  return {view.data, DType::f32, view.row_stride, view.head_stride};
}

// Where a layer finds its backend: group of ModelInfo::groups and index in the group's pool.
struct LayerSlot {
  int32_t group = 0;
  int32_t layer = 0;
};

// Softmax attention with its projections.
struct SelfAttentionParts {
  AttentionSpec spec;
  LayerSlot slot;
  Linear q, k, v, o;
  Norm q_norm, k_norm;  // over each head, before the rotation; empty: none
  Rotary rotary;
  std::vector<float> sinks;  // [q_heads] or empty
  // q yields [query | gate] for each head, and the result is multiplied by sigmoid(gate).
  bool has_output_gate = false;
};

class SelfAttention : public Block {
 public:
  explicit SelfAttention(SelfAttentionParts parts) : parts_(std::move(parts)) {}
  void forward(Pass& pass, float* x, float* out) const override;
  void take_scratch(Arena& arena, int64_t rows) const override { buffers(arena, rows); }

 protected:
  // Between projection and attention: normalises and rotates q [rows, q_heads, head_dim] and
  // k [rows, kv_heads, head_dim] in place.
  virtual void prepare(Pass& pass, kernels::HeadView q, kernels::HeadView k) const;
  const SelfAttentionParts& parts() const { return parts_; }

 private:
  struct Buffers {
    float *q, *k, *v, *out;
  };
  Buffers buffers(Arena& arena, int64_t rows) const;

  SelfAttentionParts parts_;
};

// down(activation(gate(x)) * up(x))
struct MlpParts {
  Linear gate;  // with `up` empty: gate and up in one matrix
  Linear up;
  Linear down;
  bool alternates = false;  // one matrix: columns gate, up, gate, up...; else gates, then ups
  kernels::Activation activation = kernels::Activation::silu;

  int32_t width() const { return down.k; }
  // Per row: gates and ups, and where they alternate the result, which then cannot overwrite them.
  int64_t hidden_floats() const { return (alternates ? 3 : 2) * static_cast<int64_t>(width()); }
  // `hidden`: scratch of rows * hidden_floats() floats.
  void apply(Rows x, Rows out, int64_t rows, float* hidden, ThreadPool& threads) const;
};

class Mlp : public Block {
 public:
  explicit Mlp(MlpParts parts) : parts_(std::move(parts)) {}
  void forward(Pass& pass, float* x, float* out) const override;
  void take_scratch(Arena& arena, int64_t rows) const override;

 private:
  MlpParts parts_;
};

// Routed experts, plus a shared one that sees every row. Rows are grouped by expert; a row's sum
// has the order of the experts' numbers, so its bits do not depend on the rest of the batch.
struct MoeParts {
  Linear router;                      // [experts, hidden]
  kernels::MoeRoutingParams routing;  // score, top_k, ...; the rest is set per pass
  std::vector<float> choice_bias;     // [experts] or empty
  bool weights_scale_input = false;   // the expert sees weight * x, and its output counts once
  std::vector<MlpParts> experts;
  MlpParts shared;     // down empty: none
  Linear shared_gate;  // [1, hidden]: shared times sigmoid(gate(x)); empty: 1
};

class Moe : public Block {
 public:
  explicit Moe(MoeParts parts) : parts_(std::move(parts)) {}
  void forward(Pass& pass, float* x, float* out) const override;
  void take_scratch(Arena& arena, int64_t rows) const override { buffers(arena, rows); }

 private:
  struct Buffers {
    float *logits, *weights, *gathered, *hidden, *expert_out, *expert_weights;
    int32_t *ids, *begins, *rows_of_expert;
  };
  Buffers buffers(Arena& arena, int64_t rows) const;
  void shared(const Pass& pass, const Buffers& scratch, float* x, float* out) const;
  void route(const Pass& pass, const Buffers& scratch, float* x) const;

  MoeParts parts_;
};

}  // namespace fovea
