// SPDX-License-Identifier: Apache-2.0
// Building blocks of decoder layers: softmax attention over a backend, gated MLPs and mixtures of
// experts. An architecture combines them and adds its own. They run on any ModelDevice.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "fovea/attention_backend.h"
#include "model/device.h"

namespace fovea {

// Hands out scratch from one block, front to back. Without memory it only counts.
class Arena {
 public:
  explicit Arena(DType activation, std::span<std::byte> memory = {})
      : activation_(activation), memory_(memory) {}

  // Returns [count, width] in the device's activation dtype.
  Rows rows(int64_t count, int64_t width);
  Rows float_rows(int64_t count, int64_t width);
  float* floats(int64_t count) { return reinterpret_cast<float*>(bytes(count * 4)); }
  int32_t* ints(int64_t count) { return reinterpret_cast<int32_t*>(bytes(count * 4)); }
  std::byte* bytes(int64_t count);  // aligned to 256 bytes if the block is
  size_t used() const { return used_; }

 private:
  DType activation_;
  std::span<std::byte> memory_;
  size_t used_ = 0;
};

// One forward pass, as seen by a block.
struct Pass {
  std::span<AttentionBackend* const> backends;  // one per layer group
  const int32_t* positions = nullptr;           // [rows]
  int64_t rows = 0;
  ModelDevice* device = nullptr;
  Arena arena;         // empty at the start of every block
  JoinedSteps joined;  // steps before and after the block that are its own, if it joins_norms()
};

// One residual branch of a layer.
class Block {
 public:
  virtual ~Block() = default;
  // Computes out = f(x). Both are [rows, hidden], dense and distinct, and `out` is f32. x may be
  // overwritten.
  virtual void forward(Pass& pass, Rows x, Rows out) const = 0;
  // Returns true if forward() computes Pass::joined with its first and last product. It then writes
  // no `out` if a step follows the last one.
  virtual bool joins_norms(const ModelDevice& device, int64_t rows) const {
    (void)device, (void)rows;
    return false;
  }
  // Takes the scratch from the arena that forward() takes for `rows` rows.
  virtual void take_scratch(Arena& arena, int64_t rows) const = 0;
};

// The first and the last product of a block that joins_norms(), with its part of Pass::joined. The
// result of the last one may be a part of a sum over ranks.
void multiply_first(const Pass& pass, const Linear& weights, Rows x, Rows out);
void multiply_last(const Pass& pass, const Linear& weights, Rows x, Rows out);

// Views each row as adjacent heads of `dim` values.
inline HeadRows as_heads(Rows rows, int64_t dim) {
  return {rows.data, rows.dtype, rows.stride, dim};
}
// Views the values of every head from `dim` on.
inline HeadRows from_dim(HeadRows rows, int64_t dim) {
  rows.data =
      static_cast<std::byte*>(rows.data) + dim * static_cast<int64_t>(dtype_bytes(rows.dtype));
  return rows;
}
inline Rows from_row(Rows rows, int64_t row) {
  rows.data = static_cast<std::byte*>(rows.data) +
              row * rows.stride * static_cast<int64_t>(dtype_bytes(rows.dtype));
  return rows;
}
inline Rows from_column(Rows rows, int64_t column) {
  rows.data =
      static_cast<std::byte*>(rows.data) + column * static_cast<int64_t>(dtype_bytes(rows.dtype));
  return rows;
}

// Identifies the backend and cache of a layer: the group in ModelInfo::groups and the index in the
// group's pool.
struct LayerSlot {
  int32_t group = 0;
  int32_t layer = 0;
};

// Returns true if the backend should norm and rotate q and k (AttentionSpec::has_rope) when there
// are no other steps between projection and attention. On a GPU this saves launches in each layer.
// Backends with distributed contexts get the queries of other ranks, which must be rotated before.
inline bool rotates_in_backend(const ModelDevice& device) {
  return device.kind() == DeviceKind::cuda && !device.shares_contexts();
}

inline RotaryTensors rotary_tensors(const Rotary& rotary, const int32_t* positions) {
  return {rotary.table->cos,
          rotary.table->sin,
          rotary.table->max_positions,
          rotary.table->rotary_dim,
          rotary.layout == kernels::RopeLayout::interleaved,
          positions};
}

// Norms rows that are divided among the device's ranks. The `squares` of the steps lie one behind
// another.
void norm_over_ranks(ModelDevice& device, std::span<const DividedNorm> steps);

// Softmax attention with its projections.
struct SelfAttentionParts {
  AttentionSpec spec;
  LayerSlot slot;
  Linear q, k, v;  // if k and v are empty, q contains the rows of all three
  Linear o;
  // Norms of all heads of q, and of all of k, before the steps of each head. Both or neither.
  Norm q_row_norm, k_row_norm;
  HeadSteps q_steps, k_steps;                 // before the backend
  Rotary in_backend;                          // rotation by the backend, with spec.has_rope
  Norm q_norm_in_backend, k_norm_in_backend;  // before that rotation; optional
  std::span<const float> sinks;               // [q_heads] or empty
  // If true, q yields [query | gate] for each head, and results are multiplied by sigmoid(gate).
  bool has_output_gate = false;

  // Adds the norms of each head of q and k, if there are any, and the rotation after them.
  void prepare_heads(const Norm& q_norm, const Norm& k_norm, const Rotary& rotary) {
    if (spec.has_rope) {
      in_backend = rotary;
      q_norm_in_backend = q_norm;
      k_norm_in_backend = k_norm;
    } else {
      q_steps.rotary = k_steps.rotary = rotary;
      q_steps.norm = q_norm;
      k_steps.norm = k_norm;
    }
  }
};

class SelfAttention : public Block {
 public:
  explicit SelfAttention(SelfAttentionParts parts) : parts_(std::move(parts)) {}
  void forward(Pass& pass, Rows x, Rows out) const override;
  bool joins_norms(const ModelDevice& device, int64_t rows) const override;
  void take_scratch(Arena& arena, int64_t rows) const override { buffers(arena, rows); }

 private:
  struct Buffers {
    Rows q, k, v, out;
    float* squares;  // sums for row norms
  };
  Buffers buffers(Arena& arena, int64_t rows) const;
  // Norms all heads of q together, and all of k.
  void norm_rows(const Pass& pass, const Buffers& scratch) const;

  SelfAttentionParts parts_;
};

class Mlp : public Block {
 public:
  explicit Mlp(MlpParts parts) : parts_(std::move(parts)) {}
  void forward(Pass& pass, Rows x, Rows out) const override;
  bool joins_norms(const ModelDevice& device, int64_t rows) const override;
  void take_scratch(Arena& arena, int64_t rows) const override;

 private:
  MlpParts parts_;
};

// Scratch of apply_mlp: gates and ups of every row. Alternating columns need a separate result,
// which cannot overwrite them.
struct MlpBuffers {
  Rows hidden, activated;
};
MlpBuffers mlp_buffers(const MlpParts& parts, Arena& arena, int64_t rows);
void apply_mlp(const MlpParts& parts, ModelDevice& device, const MlpBuffers& buffers, Rows x,
               Rows out, int64_t rows);

// Routed experts, and a shared expert that processes every row.
struct MoeParts {
  Linear router;                       // [experts, hidden]
  kernels::MoeRoutingParams routing;   // score, top_k, ...; the other fields are set per pass
  std::span<const float> choice_bias;  // [experts] or empty
  std::unique_ptr<const Experts> experts;
  MlpParts shared;     // optional
  Linear shared_gate;  // [1, hidden]: scales the shared expert by sigmoid(gate(x)); optional
};

class Moe : public Block {
 public:
  explicit Moe(MoeParts parts) : parts_(std::move(parts)) {}
  void forward(Pass& pass, Rows x, Rows out) const override;
  void take_scratch(Arena& arena, int64_t rows) const override { buffers(arena, rows); }

 private:
  struct Buffers {
    Rows logits, gate;
    float* weights;
    int32_t* ids;
    MlpBuffers shared;
    std::byte* experts;
  };
  Buffers buffers(Arena& arena, int64_t rows) const;
  void shared(const Pass& pass, const Buffers& scratch, Rows x, Rows out) const;
  ExpertChoice route(const Pass& pass, const Buffers& scratch, Rows x) const;

  MoeParts parts_;
};

}  // namespace fovea
