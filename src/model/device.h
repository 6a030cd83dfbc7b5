// SPDX-License-Identifier: Apache-2.0
// What a model computes with and where its bytes live: the seam between the architectures and the
// device they run on. There is one implementation for the CPU and one for NVIDIA GPUs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "fovea/device.h"
#include "fovea/tensor.h"
#include "fovea/thread_pool.h"
#include "kernels/layer_ops.h"
#include "model/safetensors.h"

namespace fovea {

// Rows of activations, `stride` elements apart.
struct Rows {
  void* data = nullptr;
  int64_t stride = 0;
  DType dtype = DType::f32;

  float* floats() const { return static_cast<float*>(data); }  // dtype f32
};

// y = x W^T + b. The weights belong to the device's memory or, on the CPU, to the mapped
// checkpoint.
struct Linear {
  const std::byte* weight = nullptr;  // [n, k], or [k, n] when is_kn
  DType dtype = DType::f32;
  int32_t n = 0, k = 0;
  int64_t stride = 0;  // elements between rows of the matrix
  bool is_kn = false;
  const float* bias = nullptr;  // [n] or null

  explicit operator bool() const { return weight != nullptr; }
};

// RMSNorm over the last dimension.
struct Norm {
  std::span<const float> weight;  // [dim]; empty: none
  float epsilon = 0;
  bool plus_one = false;  // times (1 + weight)

  explicit operator bool() const { return !weight.empty(); }
  int32_t dim() const { return static_cast<int32_t>(weight.size()); }
};

// Rotation of q and k. The model owns the table, which its layers share and which is empty until
// Model::reserve.
struct Rotary {
  const kernels::RopeTableView* table = nullptr;  // null: no positions in this layer
  kernels::RopeLayout layout = kernels::RopeLayout::half_split;

  explicit operator bool() const { return table != nullptr; }
};

// What happens to the heads of q or k between projection and attention, in this order and in place.
struct HeadSteps {
  Norm norm;                        // over each head
  Rotary rotary;                    // needs positions
  std::optional<float> l2_epsilon;  // RMSNorm without weights
  kernels::PositionScale scale;     // needs positions; factor 0: none
};

// x += branch_factor * [branch_norm](branch), then normed = norm(x).
struct ResidualStep {
  float* x = nullptr;       // [rows, dim], dense
  float* branch = nullptr;  // [rows, dim], dense, may be overwritten; null: x stays as it is
  Norm branch_norm;         // empty: none
  float branch_factor = 1;
  Norm norm;    // empty: normed is x
  Rows normed;  // data null: not written
  int64_t rows = 0;
  int32_t dim = 0;
};

// down(activation(gate(x)) * up(x))
struct MlpParts {
  Linear gate;  // with `up` empty: gate and up in one matrix
  Linear up;
  Linear down;
  bool alternates = false;  // one matrix: columns gate, up, gate, up...; else gates, then ups
  kernels::Activation activation = kernels::Activation::silu;
  kernels::SwigluBounds bounds;  // clamped_swiglu

  int32_t width() const { return down.k; }
};

// Which experts every row goes to, and with what weight.
struct ExpertChoice {
  const int32_t* ids = nullptr;    // [rows, top_k]
  const float* weights = nullptr;  // [rows, top_k]
  int32_t top_k = 0;
};

// Routed experts bound to their weights. A row's sum has the order of the experts' numbers, so its
// bits do not depend on the rest of the batch.
class Experts {
 public:
  virtual ~Experts() = default;
  virtual size_t scratch_bytes(int64_t rows, int32_t top_k) const = 0;
  // out += sum of weight * expert(x) or, with weights_scale_input, of expert(weight * x).
  virtual void add(const ExpertChoice& choice, Rows x, Rows out, int64_t rows,
                   std::byte* scratch) const = 0;
};

// None of the operations allocates. On a GPU they are enqueued on stream(), every pointer is
// device memory, and only the streams of rows that are f32 everywhere are f32: the residual, a
// block's result, router scores and logits. Every output row depends on the same input row only.
class ModelDevice {
 public:
  virtual ~ModelDevice() = default;
  virtual DeviceKind kind() const = 0;
  virtual int sm() const = 0;               // compute capability * 10; 0 on the CPU
  virtual ThreadPool* threads() const = 0;  // of CPU kernels; null on a GPU
  virtual Stream stream() const = 0;        // null on the CPU
  // Of what enters matrix products and attention.
  virtual DType activation_dtype() const = 0;

  // Weights, valid as long as the device; a tensor placed twice, with the same data or the same
  // object whose data is made, is stored once. Error{unsupported} names the tensor whose dtype this
  // device does not multiply.
  virtual const std::byte* place(const StoredTensor& tensor, std::string_view name) = 0;
  // The rows of several matrices of equal width under one another, for one product instead of
  // several. Null: this device gains nothing by it.
  virtual const std::byte* place_joined(std::span<const StoredTensor* const> tensors,
                                        std::string_view name) = 0;
  virtual std::span<const float> place(std::vector<float> values) = 0;
  virtual std::unique_ptr<Experts> place(std::vector<MlpParts> experts,
                                         bool weights_scale_input) = 0;
  virtual size_t weight_bytes() const = 0;              // placed so far, without what stays mapped
  virtual size_t product_bytes() const = 0;             // workspace of linear()
  virtual size_t vector_bytes(size_t count) const = 0;  // that a large vector takes
  // For activations: aligned to 64 bytes; on a GPU to 256, and zeroed.
  virtual std::shared_ptr<std::byte> allocate(size_t bytes) = 0;

  virtual void linear(const Linear& weights, Rows x, Rows out, int64_t rows) = 0;
  virtual void residual(const ResidualStep& step) = 0;
  // x [rows, heads, dim] in place. positions: [rows], may be null where no step needs them. On a
  // GPU heads of more than 2048 dims have no step but the norm: Error{unsupported}.
  virtual void prepare_heads(const HeadSteps& steps, HeadRows x, int64_t rows, int32_t heads,
                             int32_t dim, const int32_t* positions) = 0;
  // out[r, i] = activation(gate[r, i]) * up[r, i] of one `in` [rows, 2 * width] as `parts` says.
  // out may be `in` unless columns alternate.
  virtual void gated_activation(const MlpParts& parts, Rows in, Rows out, int64_t rows) = 0;
  // x[r, h, i] *= sigmoid(gate[r, h, i]); gate_dim 1: one gate for all dims of a head.
  virtual void sigmoid_gate(HeadRows x, HeadRows gate, int64_t rows, int32_t heads, int32_t dim,
                            int32_t gate_dim) = 0;
  virtual void moe_routing(const kernels::MoeRoutingParams& params) = 0;
  virtual void embedding(const kernels::EmbeddingParams& params) = 0;
  virtual void gather_rows(const kernels::ExpertRowsParams& params) = 0;  // weight null
  virtual void fill_zero(float* x, int64_t count) = 0;
  virtual void soft_cap(float* x, float cap, int64_t count) = 0;  // cap * tanh(x / cap)
};

// The CPU's kernels on `threads`, which outlives the device. Weights stay in the mapped checkpoint.
std::unique_ptr<ModelDevice> make_host_device(ThreadPool& threads);

}  // namespace fovea
