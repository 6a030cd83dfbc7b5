// SPDX-License-Identifier: Apache-2.0
// The interface between architectures and the device that they run on: where bytes live, and the
// operations on them. There is one implementation for the CPU and one for NVIDIA GPUs.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "fovea/communicator.h"
#include "fovea/device.h"
#include "fovea/tensor.h"
#include "fovea/thread_pool.h"
#include "kernels/layer_ops.h"
#include "model/safetensors.h"

namespace fovea {

class ContextLinks;
class RankSums;

// Rows of activations at intervals of `stride` elements.
struct Rows {
  void* data = nullptr;
  int64_t stride = 0;
  DType dtype = DType::f32;

  float* floats() const { return static_cast<float*>(data); }  // requires dtype f32
};

// y = x W^T + b. The weights are in memory of the device or, on the CPU, in the mapped checkpoint.
struct Linear {
  const std::byte* weight = nullptr;  // [n, k], or [k, n] if is_kn
  DType dtype = DType::f32;
  int32_t n = 0, k = 0;
  int64_t stride = 0;  // elements between rows of the matrix
  bool is_kn = false;
  const float* bias = nullptr;  // [n] or null

  explicit operator bool() const { return weight != nullptr; }
};

// RMSNorm over the last dimension.
struct Norm {
  std::span<const float> weight;  // [dim], empty for no norm
  float epsilon = 0;
  bool plus_one = false;  // multiplies by (1 + weight)

  explicit operator bool() const { return !weight.empty(); }
  int32_t dim() const { return static_cast<int32_t>(weight.size()); }
};

// Rotation of q and k. The model owns the table, which layers share. It is empty until
// Model::reserve().
struct Rotary {
  const kernels::RopeTableView* table = nullptr;  // null if the layer has no positions
  kernels::RopeLayout layout = kernels::RopeLayout::half_split;

  explicit operator bool() const { return table != nullptr; }
};

// A norm of heads with a gate. With silu_before, the weights are those of all heads, one after
// another.
struct GatedNorm {
  Norm norm;
  kernels::NormGate gate = kernels::NormGate::silu;

  bool has_weights_of_heads() const { return gate == kernels::NormGate::silu_before; }
  int32_t dim(int32_t heads) const {
    return has_weights_of_heads() ? norm.dim() / heads : norm.dim();
  }
};

// RMSNorm of x, or of x * silu(gate), whose rows are divided among ranks: each has norm.dim() of
// the `parts` times as many values of a row.
struct DividedNorm {
  Norm norm;
  Rows x;
  Rows gate;  // f32; without data there is none
  Rows out;   // activations; may be x
  // [rows], sums of squares of the values of this rank, later of all values.
  float* squares = nullptr;
  int64_t rows = 0;
  int32_t parts = 1;
};

// Steps applied in place to the heads of q or k between projection and attention, in this order.
struct HeadSteps {
  Norm norm;                        // normalises each head
  Rotary rotary;                    // needs positions
  std::optional<float> l2_epsilon;  // RMSNorm without weights
  kernels::PositionScale scale;     // needs positions; factor 0 disables it
};

// Computes x += branch_factor * [branch_norm](branch), then normed = norm(x).
struct ResidualStep {
  float* x = nullptr;       // [rows, dim], dense
  float* branch = nullptr;  // [rows, dim], dense, may be overwritten; null leaves x unchanged
  bool is_part = false;     // the branch is the sum over the device's ranks of their branches
  Norm branch_norm;         // optional
  float branch_factor = 1;
  Norm norm;    // if empty, normed = x
  Rows normed;  // not written if data is null
  int64_t rows = 0;
  int32_t dim = 0;
};

// A norm that the product before it begins and the product after it ends: rows hold x * weight, and
// the factor of a row follows from its sums of squares. Rows are complete if `squares` is null.
struct DeferredNorm {
  const float* squares = nullptr;  // [rows, sums_of_squares(dim)]
  float epsilon = 0;
};
// Sums of squares of a row.
constexpr int64_t sums_of_squares(int64_t dim) { return (dim + 15) / 16; }
// No device joins norms to products of more rows.
inline constexpr int64_t kMaxJoinedRows = 128;

// Steps that ModelDevice::joined_linear() computes with a product.
struct JoinedSteps {
  DeferredNorm before;  // norm of the product's input
  // Adds the product to after.x, and begins after.norm in after.normed and `squares`; computed if
  // after.x is not null. It has no branch and no branch_norm.
  ResidualStep after;
  float* squares = nullptr;

  explicit operator bool() const { return before.squares != nullptr || after.x != nullptr; }
};

// Computes down(activation(gate(x)) * up(x)).
struct MlpParts {
  Linear gate;  // contains gate and up if `up` is empty
  Linear up;
  Linear down;
  // Columns of a joined matrix are gate, up, gate, up, ...; otherwise all gates precede all ups.
  bool alternates = false;
  kernels::Activation activation = kernels::Activation::silu;
  kernels::SwigluBounds bounds;  // for clamped_swiglu

  int32_t width() const { return down.k; }
};

// Heads and the steps that apply to them.
struct HeadSet {
  const HeadSteps& steps;
  HeadRows x;
  int32_t heads = 0;
};

// The experts selected for each row, and their weights.
struct ExpertChoice {
  const int32_t* ids = nullptr;    // [rows, top_k]
  const float* weights = nullptr;  // [rows, top_k]
  int32_t top_k = 0;
};

// Routed experts with their weights. A row's sum follows the order of expert numbers, so its bits
// do not depend on the other rows. On a GPU that is not row-invariant they may depend on whether
// there are more than 8 rows.
class Experts {
 public:
  virtual ~Experts() = default;
  virtual size_t scratch_bytes(int64_t rows, int32_t top_k) const = 0;
  // Computes out = the sum of weight * expert(x), or of expert(weight * x) with
  // weights_scale_input; with `adds`, adds the sum to what `out` holds.
  virtual void run(const ExpertChoice& choice, Rows x, Rows out, int64_t rows, bool adds,
                   std::byte* scratch) const = 0;
};

// No operation allocates. On a GPU, operations are enqueued on stream() and all pointers are device
// memory. These rows are f32 on every device: the residual stream, results of blocks, router scores
// and logits. Every output row depends only on the same input row.
class ModelDevice {
 public:
  virtual ~ModelDevice() = default;
  virtual DeviceKind kind() const = 0;
  virtual int sm() const = 0;               // compute capability * 10; 0 on the CPU
  virtual ThreadPool* threads() const = 0;  // threads of the CPU kernels; null on a GPU
  virtual Stream stream() const = 0;        // null on the CPU
  // Returns the dtype of inputs of matrix products and attention.
  virtual DType activation_dtype() const = 0;
  // Makes a GPU current on the calling thread, as its operations require.
  virtual void bind() const {}
  // The ranks that share the model by tensor parallelism; null: this device has all of it.
  virtual Communicator* ranks() const { return nullptr; }
  // All ranks send `bytes` bytes, and receive those of all.
  virtual void gather(const void* send, void* receive, size_t bytes) {
    ranks()->all_gather(send, receive, bytes, stream());
  }
  // Replaces values by their sums over the ranks.
  virtual void sum_over_ranks(float* values, int64_t count) {
    ranks()->all_reduce(values, values, count, DType::f32, ReduceOp::sum, stream());
  }
  // Ranks of a GPU. While a pass is rehearsed, it computes with its own part of each sum, so that
  // nothing is loaded or allocated later, when other ranks wait for this one.
  virtual void rehearse(bool on) { (void)on; }
  // Ranks of one process: waits on the host until all are here.
  virtual void meet_ranks() {}
  // Throws Error{device_failure} with the reason if a rank has failed.
  virtual void check_ranks() {}
  // Fails this rank, and ends what waits for others on it.
  virtual void end_ranks(std::string_view reason) { (void)reason; }
  virtual std::chrono::milliseconds rank_timeout() const { return {}; }
  // Returns the largest value of all ranks, which so decide alike by what each has measured. Ranks
  // on GPUs must be of one process.
  virtual int64_t largest_of_ranks(int64_t value) { return value; }
  // True if these ranks also distribute the contexts of layers that allow it.
  virtual bool shares_contexts() const { return false; }
  // Returns true if each rank has whole experts instead of columns of all.
  virtual bool divides_experts() const { return false; }
  // How ranks on GPUs exchange what distributed contexts need; null on the CPU.
  virtual ContextLinks* context_links() { return nullptr; }

  // Places weights, which stay valid as long as the device. A tensor is stored once even if it is
  // placed twice, which is recognised by its data or, for generated values, by its object. Throws
  // Error{unsupported} naming the tensor if the device does not multiply by its dtype.
  virtual const std::byte* place(const StoredTensor& tensor, std::string_view name) = 0;
  // Places the rows of several matrices of equal width one below another, so that one product
  // replaces several. Returns null if the device does not benefit from it.
  virtual const std::byte* place_joined(std::span<const StoredTensor* const> tensors,
                                        std::string_view name) = 0;
  // Matrices of which ranks keep a part are located, cut (shard.h), and then placed, so that a
  // device with memory of its own holds the part only. locate() returns an address that stands for
  // the tensor; arithmetic on it finds a part of the matrix. By default the tensor is placed.
  virtual const std::byte* locate(const StoredTensor& tensor, std::string_view name) {
    return place(tensor, name);
  }
  // Places the part, with its own biases.
  virtual Linear place_part(const Linear& part) { return part; }
  // Places parts of equal k as one matrix of their rows in this order. Returns an empty one, and
  // places nothing, if the device does not benefit from it.
  virtual Linear join_parts(std::span<const Linear> parts) {
    (void)parts;
    return {};
  }
  virtual std::span<const float> place(std::vector<float> values) = 0;
  virtual const int32_t* place_ints(std::vector<int32_t> values) = 0;
  // Returns the values of a vector that was placed.
  virtual std::vector<float> read(std::span<const float> placed) const {
    return {placed.begin(), placed.end()};
  }
  virtual std::unique_ptr<Experts> place(std::vector<MlpParts> experts,
                                         bool weights_scale_input) = 0;
  virtual size_t weight_bytes() const = 0;              // placed so far, without mapped files
  virtual size_t product_bytes() const = 0;             // workspace of linear()
  virtual size_t vector_bytes(size_t count) const = 0;  // bytes of a large vector
  // Allocates memory for activations, aligned to 64 bytes. On a GPU it is aligned to 256 bytes and
  // zeroed.
  virtual std::shared_ptr<std::byte> allocate(size_t bytes) = 0;

  virtual void linear(const Linear& weights, Rows x, Rows out, int64_t rows) = 0;
  // As linear(), for up to three products of the same rows, each [0, n) of an output of its own.
  struct Product {
    const Linear& weights;
    Rows out;
  };
  virtual void linears(std::span<const Product> products, Rows x, int64_t rows) {
    for (const Product& product : products) linear(product.weights, x, product.out, rows);
  }
  // As linear(), for the last product of a branch: `out` is dense f32, and the next residual()
  // takes its sum over the ranks (ResidualStep::is_part). A device may send it to the others at
  // once.
  virtual void part_linear(const Linear& weights, Rows x, Rows out, int64_t rows) {
    linear(weights, x, out, rows);
  }
  // Returns true if joined_linear() computes this product of dense rows, and gated_linear() if the
  // matrix holds gates and ups.
  virtual bool joins_norms(const Linear& weights, int64_t rows) const {
    (void)weights, (void)rows;
    return false;
  }
  // As linear(), with the steps around the product. Writes no `out` if a step follows. Returns
  // false, and does nothing, unless joins_norms().
  virtual bool joined_linear(const Linear& weights, const JoinedSteps& steps, Rows x, Rows out,
                             int64_t rows) {
    (void)weights, (void)steps, (void)x, (void)out, (void)rows;
    return false;
  }
  // Computes out = activation(gate(x)) * up(x) at once, where `norm` is that of x. Returns false,
  // and does nothing, if the device has no such operation for these weights and rows; the caller
  // then computes the product and gated_activation().
  virtual bool gated_linear(const MlpParts& parts, const DeferredNorm& norm, Rows x, Rows out,
                            int64_t rows) {
    (void)parts, (void)norm, (void)x, (void)out, (void)rows;
    return false;
  }
  virtual void residual(const ResidualStep& step) = 0;
  // Applies the steps to x [rows, heads, dim] in place. positions: [rows], may be null if no step
  // needs them. On a GPU, heads of more than 2048 dims support the norm only; other steps throw
  // Error{unsupported}.
  virtual void prepare_heads(const HeadSteps& steps, HeadRows x, int64_t rows, int32_t heads,
                             int32_t dim, const int32_t* positions) = 0;
  // Does the same for two sets of heads of equal rows, such as those of q and k.
  virtual void prepare_head_sets(const HeadSet& first, const HeadSet& second, int64_t rows,
                                 int32_t dim, const int32_t* positions) {
    prepare_heads(first.steps, first.x, rows, first.heads, dim, positions);
    prepare_heads(second.steps, second.x, rows, second.heads, dim, positions);
  }
  // Computes out[r, i] = activation(gate[r, i]) * up[r, i] from `in` [rows, 2 * width], whose
  // layout `parts` describes. `out` may be `in` unless columns alternate.
  virtual void gated_activation(const MlpParts& parts, Rows in, Rows out, int64_t rows) = 0;
  // Computes x[r, h, i] *= sigmoid(gate[r, h, i]). With gate_dim 1, a head has one gate for all
  // dims.
  virtual void sigmoid_gate(HeadRows x, HeadRows gate, int64_t rows, int32_t heads, int32_t dim,
                            int32_t gate_dim) = 0;
  virtual void delta_inputs(const kernels::DeltaInputsParams& params) = 0;
  virtual void mamba2_inputs(const kernels::Mamba2InputsParams& params) = 0;
  virtual void kda_gates(const kernels::KdaGatesParams& params) = 0;
  // Computes out[r, i] = x[r, i] * silu(gate[r, i]) from f32, or x[r, i] if `gate` has no data. out
  // are activations.
  virtual void silu_gate(Rows x, Rows gate, Rows out, int64_t rows, int64_t width) = 0;
  // Computes out[r, i] = x[r, i] * y[r, i] from f32. out are f32, and may be x or y, or
  // activations.
  virtual void multiply(Rows x, Rows y, Rows out, int64_t rows, int64_t width) = 0;
  virtual void softplus(float* x, int64_t count) = 0;  // x becomes ln(1 + e^x)
  // Norms x [rows, heads, dim] with the gate, from f32. `out` may be x if it is f32, too.
  virtual void gated_norm(const GatedNorm& norm, HeadRows x, HeadRows gate, HeadRows out,
                          int64_t rows, int32_t heads) = 0;
  // The two halves of a divided norm: the sums of squares of this rank's values, and `out`, once
  // `squares` are the sums over all ranks.
  virtual void divided_norm_squares(const DividedNorm& step) = 0;
  virtual void divided_norm_scale(const DividedNorm& step) = 0;
  virtual void moe_routing(const kernels::MoeRoutingParams& params) = 0;
  virtual void embedding(const kernels::EmbeddingParams& params) = 0;
  virtual void gather_rows(const kernels::ExpertRowsParams& params) = 0;  // requires a null weight
  // Copies `width` values of row r, f32 or activations, to row index[r] of `to`, which is f32,
  // unless that is negative. Without an index it is row r.
  virtual void store_rows(Rows from, Rows to, const int64_t* index, int64_t rows,
                          int64_t width) = 0;
  // Computes out[r, c] = x[r, index[c]] for c < width, or -inf where the index is negative. x and
  // out are f32.
  virtual void spread_columns(Rows x, Rows out, const int32_t* index, int64_t rows,
                              int64_t width) = 0;
  // Copies `width` f32 of each row.
  virtual void copy_rows(Rows from, Rows to, int64_t rows, int64_t width) = 0;
  virtual void soft_cap(float* x, float cap, int64_t count) = 0;  // x becomes cap * tanh(x / cap)
};

// The ranks of a model; see ModelDevice. Pointers must outlive the device.
struct ModelRanks {
  Communicator* communicator = nullptr;  // on the device of the model
  bool share_contexts = false;
  bool divide_experts = false;  // by experts, not by their columns
  // Lets ranks meet on the host, without the device. May be null.
  Communicator* host = nullptr;
  RankSums* sums = nullptr;          // sums of a few rows over GPUs; may be null
  ContextLinks* contexts = nullptr;  // GPUs with share_contexts; null: over the communicator
  // A pass of a GPU that has waited for other ranks for as long as this fails.
  std::chrono::milliseconds timeout{10'000};
};
// Makes the CPU device. `threads` runs its kernels and must outlive it. Weights stay in the mapped
// checkpoint.
std::unique_ptr<ModelDevice> make_host_device(ThreadPool& threads, const ModelRanks& ranks = {});

}  // namespace fovea
