// SPDX-License-Identifier: Apache-2.0
// The parts decoder layers are made of: softmax attention over a backend, gated MLPs and mixtures
// of experts. An architecture puts them together and adds what only it has. All of it runs on any
// ModelDevice.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "fovea/attention_backend.h"
#include "model/device.h"

namespace fovea {

// Hands out the scratch of one block, front to back. Without memory it only counts.
class Arena {
 public:
  explicit Arena(DType activation, std::span<std::byte> memory = {})
      : activation_(activation), memory_(memory) {}

  // [count, width] in the device's activation dtype.
  Rows rows(int64_t count, int64_t width);
  Rows float_rows(int64_t count, int64_t width);
  float* floats(int64_t count) { return reinterpret_cast<float*>(bytes(count * 4)); }
  int32_t* ints(int64_t count) { return reinterpret_cast<int32_t*>(bytes(count * 4)); }
  std::byte* bytes(int64_t count);  // 256-byte aligned where the memory is
  size_t used() const { return used_; }

 private:
  DType activation_;
  std::span<std::byte> memory_;
  size_t used_ = 0;
};

// One forward pass, as a block sees it.
struct Pass {
  std::span<AttentionBackend* const> backends;  // one per layer group
  const int32_t* positions = nullptr;           // [rows]
  int64_t rows = 0;
  ModelDevice* device = nullptr;
  Arena arena;  // fresh for every block
};

// One residual branch of a layer.
class Block {
 public:
  virtual ~Block() = default;
  // out [rows, hidden], f32, = f(x [rows, hidden]), both dense and distinct. x may be overwritten.
  virtual void forward(Pass& pass, Rows x, Rows out) const = 0;
  // Takes from the arena what forward() takes for `rows` rows.
  virtual void take_scratch(Arena& arena, int64_t rows) const = 0;
};

// `heads` of `dim` values each, side by side in every row.
inline HeadRows as_heads(Rows rows, int64_t dim) {
  return {rows.data, rows.dtype, rows.stride, dim};
}
// The values of every head from `dim` on.
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

// Where a layer finds its backend: group of ModelInfo::groups and index in the group's pool.
struct LayerSlot {
  int32_t group = 0;
  int32_t layer = 0;
};

// Whether AttentionSpec::has_rope pays where nothing else happens to q and k between projection and
// attention: on a GPU it saves two launches a layer.
inline bool rotates_in_backend(const ModelDevice& device) {
  return device.kind() == DeviceKind::cuda;
}

inline RotaryTensors rotary_tensors(const Rotary& rotary, const int32_t* positions) {
  return {rotary.table->cos,
          rotary.table->sin,
          rotary.table->max_positions,
          rotary.table->rotary_dim,
          rotary.layout == kernels::RopeLayout::interleaved,
          positions};
}

// Softmax attention with its projections.
struct SelfAttentionParts {
  AttentionSpec spec;
  LayerSlot slot;
  Linear q, k, v;  // with k and v empty: q, k and v in one matrix
  Linear o;
  Norm q_row_norm, k_row_norm;  // over all heads together, before the steps of each; empty: none
  HeadSteps q_steps, k_steps;
  Rotary in_backend;             // with spec.has_rope: what the backend does to q and k
  std::span<const float> sinks;  // [q_heads] or empty
  // q yields [query | gate] for each head, and the result is multiplied by sigmoid(gate).
  bool has_output_gate = false;

  void rotate(const Rotary& rotary) {
    if (spec.has_rope) {
      in_backend = rotary;
    } else {
      q_steps.rotary = k_steps.rotary = rotary;
    }
  }
};

class SelfAttention : public Block {
 public:
  explicit SelfAttention(SelfAttentionParts parts) : parts_(std::move(parts)) {}
  void forward(Pass& pass, Rows x, Rows out) const override;
  void take_scratch(Arena& arena, int64_t rows) const override { buffers(arena, rows); }

 private:
  struct Buffers {
    Rows q, k, v, out;
  };
  Buffers buffers(Arena& arena, int64_t rows) const;

  SelfAttentionParts parts_;
};

class Mlp : public Block {
 public:
  explicit Mlp(MlpParts parts) : parts_(std::move(parts)) {}
  void forward(Pass& pass, Rows x, Rows out) const override;
  void take_scratch(Arena& arena, int64_t rows) const override;

 private:
  MlpParts parts_;
};

// Scratch of apply_mlp: gates and ups of every row, and where they alternate the result, which then
// cannot overwrite them.
struct MlpBuffers {
  Rows hidden, activated;
};
MlpBuffers mlp_buffers(const MlpParts& parts, Arena& arena, int64_t rows);
void apply_mlp(const MlpParts& parts, ModelDevice& device, const MlpBuffers& buffers, Rows x,
               Rows out, int64_t rows);

// Routed experts, plus a shared one that sees every row.
struct MoeParts {
  Linear router;                       // [experts, hidden]
  kernels::MoeRoutingParams routing;   // score, top_k, ...; the rest is set per pass
  std::span<const float> choice_bias;  // [experts] or empty
  std::unique_ptr<const Experts> experts;
  MlpParts shared;     // down empty: none
  Linear shared_gate;  // [1, hidden]: shared times sigmoid(gate(x)); empty: 1
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
