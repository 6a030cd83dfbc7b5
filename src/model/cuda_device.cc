// SPDX-License-Identifier: Apache-2.0
#include "model/cuda_device.h"

#include <limits>
#include <utility>

#include "core/check.h"
#include "dist/context_links.h"
#include "dist/rank_sums.h"
#include "gpu/cublaslt.h"
#include "kernels/cuda/store.h"
#include "model/cuda_layer_kernels.h"
#include "model/cuda_layout.h"
#include "model/cuda_weights.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

class CudaDevice final : public ModelDevice {
 public:
  explicit CudaDevice(const CudaDeviceOptions& options)
      : context_(options.index),
        stream_of_(options.stream_of),
        kernels_(context_.info().sm, cuda::kernel_store()),
        row_invariant_(options.row_invariant),
        ranks_(options.ranks),
        own_contexts_(make_contexts(options)),
        products_(options.row_invariant, options.max_rows) {}
  ~CudaDevice() override { context_.bind_to_free(); }

  DeviceKind kind() const override { return DeviceKind::cuda; }
  int sm() const override { return context_.info().sm; }
  ThreadPool* threads() const override { return nullptr; }
  Stream stream() const override { return stream_of_ ? stream_of_->stream() : own_stream_->get(); }
  DType activation_dtype() const override { return DType::bf16; }
  void bind() const override { context_.bind(); }
  Communicator* ranks() const override { return ranks_.communicator; }
  void gather(const void* send, void* receive, size_t bytes) override {
    if (!rehearses_) ranks_.communicator->all_gather(send, receive, bytes, stream());
  }
  void sum_over_ranks(float* values, int64_t count) override {
    if (!rehearses_) ModelDevice::sum_over_ranks(values, count);
  }
  void rehearse(bool on) override {
    rehearses_ = on;
    if (context_links() != nullptr) context_links()->rehearse(on);
  }
  void meet_ranks() override {
    if (ranks_.host != nullptr) ranks_.host->barrier();
  }
  int64_t largest_of_ranks(int64_t value) override {
    if (!shares_model()) return value;
    check_argument(ranks_.host != nullptr, "ranks of several processes do not meet on the host");
    ranks_.host->all_reduce(&value, &value, 1, DType::i64, ReduceOp::max);
    return value;
  }
  void check_ranks() override;
  void end_ranks(std::string_view reason) override;
  std::chrono::milliseconds rank_timeout() const override { return ranks_.timeout; }
  bool shares_contexts() const override { return ranks_.share_contexts; }
  bool divides_experts() const override { return ranks_.divide_experts; }
  ContextLinks* context_links() override {
    return own_contexts_ != nullptr ? own_contexts_.get() : ranks_.contexts;
  }

  const std::byte* place(const StoredTensor& tensor, std::string_view name) override {
    return weights_.place(tensor, name);
  }
  const std::byte* place_joined(std::span<const StoredTensor* const> tensors,
                                std::string_view name) override {
    return shares_model() ? nullptr : weights_.place_joined(tensors, name);
  }
  const std::byte* locate(const StoredTensor& tensor, std::string_view name) override {
    return shares_model() ? weights_.locate(tensor, name) : weights_.place(tensor, name);
  }
  Linear place_part(const Linear& part) override {
    return shares_model() ? weights_.place_parts({&part, 1}) : part;
  }
  // Rows of a matrix [k, n] lie side by side instead.
  Linear join_parts(std::span<const Linear> parts) override {
    return shares_model() && !parts[0].is_kn ? weights_.place_parts(parts) : Linear{};
  }
  std::span<const float> place(std::vector<float> values) override {
    return weights_.place(std::move(values));
  }
  std::vector<float> read(std::span<const float> placed) const override {
    return weights_.read(placed);
  }
  const int32_t* place_ints(std::vector<int32_t> values) override {
    return weights_.place_ints(std::move(values));
  }
  std::unique_ptr<Experts> place(std::vector<MlpParts> experts, bool weights_scale_input) override {
    return make_cuda_experts(std::move(experts), weights_scale_input, row_invariant_, kernels_,
                             stream());
  }
  size_t weight_bytes() const override { return weights_.bytes(); }
  size_t product_bytes() const override { return products_.workspace_bytes(); }
  size_t vector_bytes(size_t count) const override { return cuda_vector_bytes(count); }
  std::shared_ptr<std::byte> allocate(size_t bytes) override;

  void linear(const Linear& weights, Rows x, Rows out, int64_t rows) override;
  void part_linear(const Linear& weights, Rows x, Rows out, int64_t rows) override;
  bool joins_norms(const Linear& weights, int64_t rows) const override;
  bool joined_linear(const Linear& weights, const JoinedSteps& steps, Rows x, Rows out,
                     int64_t rows) override;
  bool gated_linear(const MlpParts& parts, const DeferredNorm& norm, Rows x, Rows out,
                    int64_t rows) override;
  void residual(const ResidualStep& step) override;
  void prepare_heads(const HeadSteps& steps, HeadRows x, int64_t rows, int32_t heads, int32_t dim,
                     const int32_t* positions) override {
    prepare_head_sets({steps, x, heads}, {steps, {}, 0}, rows, dim, positions);
  }
  void prepare_head_sets(const HeadSet& first, const HeadSet& second, int64_t rows, int32_t dim,
                         const int32_t* positions) override;
  void gated_activation(const MlpParts& parts, Rows in, Rows out, int64_t rows) override {
    launch_gated_activation(kernels_.ops, parts, in, out, rows, stream());
  }
  void sigmoid_gate(HeadRows x, HeadRows gate, int64_t rows, int32_t heads, int32_t dim,
                    int32_t gate_dim) override;
  void delta_inputs(const kernels::DeltaInputsParams& params) override {
    kernels_.ops.delta_inputs(to_kernel(params), stream());
  }
  void mamba2_inputs(const kernels::Mamba2InputsParams& params) override {
    kernels_.ops.mamba2_inputs(to_kernel(params), stream());
  }
  void kda_gates(const kernels::KdaGatesParams& params) override {
    kernels_.ops.kda_gates(to_kernel(params), stream());
  }
  void silu_gate(Rows x, Rows gate, Rows out, int64_t rows, int64_t width) override {
    kernels_.ops.silu_gate(silu_gate_params(x, gate, out, rows, width), stream());
  }
  void multiply(Rows x, Rows y, Rows out, int64_t rows, int64_t width) override {
    cuda::SiluGateKernelParams params = silu_gate_params(x, y, out, rows, width);
    params.plain = 1;
    kernels_.ops.silu_gate(params, stream());
  }
  void softplus(float* x, int64_t count) override { kernels_.ops.softplus({x, count}, stream()); }
  void gated_norm(const GatedNorm& norm, HeadRows x, HeadRows gate, HeadRows out, int64_t rows,
                  int32_t heads) override {
    kernels_.ops.gated_norm(gated_norm_params(norm, x, gate, out, rows, heads), stream());
  }
  void divided_norm_squares(const DividedNorm& step) override {
    cuda::DividedNormKernelParams params = to_kernel(step);
    params.out = nullptr;
    kernels_.ops.divided_norm(params, stream());
  }
  void divided_norm_scale(const DividedNorm& step) override {
    kernels_.ops.divided_norm(to_kernel(step), stream());
  }
  void moe_routing(const kernels::MoeRoutingParams& params) override {
    kernels_.ops.routing(to_kernel(params), stream());
  }
  void embedding(const kernels::EmbeddingParams& params) override;
  void copy_rows(Rows from, Rows to, int64_t rows, int64_t width) override;
  void gather_rows(const kernels::ExpertRowsParams& params) override;
  void store_rows(Rows from, Rows to, const int64_t* index, int64_t rows, int64_t width) override {
    kernels_.ops.store_rows({from.data, from.stride, from.dtype == DType::f32, index, to.floats(),
                             to.stride, static_cast<int32_t>(rows), static_cast<int32_t>(width)},
                            stream());
  }
  void spread_columns(Rows x, Rows out, const int32_t* index, int64_t rows,
                      int64_t width) override {
    kernels_.ops.spread_columns({x.floats(), x.stride, index, out.floats(), out.stride,
                                 static_cast<int32_t>(rows), static_cast<int32_t>(width)},
                                stream());
  }
  void soft_cap(float* x, float cap, int64_t count) override {
    kernels_.ops.soft_cap({x, count, cap}, stream());
  }

 private:
  bool shares_model() const { return ranks_.communicator != nullptr; }
  static std::unique_ptr<ContextLinks> make_contexts(const CudaDeviceOptions& options) {
    const ModelRanks& ranks = options.ranks;
    if (!ranks.share_contexts || ranks.contexts != nullptr) return nullptr;
    return std::make_unique<ContextLinks>(*ranks.communicator, options.index);
  }
  // Sums the branch of a step over the ranks. Returns true if that was the whole step.
  bool sum_branch(const ResidualStep& step, const cuda::ResidualParams& params);
  bool serves_few_rows(const Linear& weights, const cuda::SkinnyGemmParams& params) const {
    return !row_invariant_ && weights.dtype == DType::bf16 && !weights.is_kn &&
           kernels_.serves_few_rows(params);
  }

  gpu::Context context_;
  const std::shared_ptr<ModelDevice> stream_of_;
  const std::unique_ptr<gpu::OwnedStream> own_stream_{stream_of_ ? nullptr : new gpu::OwnedStream};
  CudaLayerKernels kernels_;
  bool row_invariant_;
  const ModelRanks ranks_;
  const std::unique_ptr<ContextLinks> own_contexts_;  // over the communicator
  bool rehearses_ = false;
  const void* sent_ = nullptr;  // the branch that a product has sent to the other ranks
  gpu::MatrixProducts products_;
  CudaWeights weights_{stream()};
};

std::shared_ptr<std::byte> CudaDevice::allocate(size_t bytes) {
  auto buffer = std::make_shared<gpu::DeviceBuffer>(bytes);
  gpu::fill_bytes(buffer->data(), 0, bytes, stream());
  gpu::synchronize(stream());
  return {buffer, buffer->data<std::byte>()};
}

// Few rows need the bytes of the weights only. Products in which all numbers of rows shall have the
// same bits are cuBLASLt's.
void CudaDevice::linear(const Linear& weights, Rows x, Rows out, int64_t rows) {
  if (weights.n == 1) {
    const cuda::SingleColumnParams params{
        .x = x.data,
        .weight = weights.weight,
        .bias = weights.bias,
        .out = out.data,
        .x_stride = x.stride,
        .weight_step = weights.is_kn ? weights.stride : 1,
        .out_stride = out.stride,
        .rows = static_cast<int32_t>(rows),
        .k = weights.k,
        .out_is_f32 = out.dtype == DType::f32,
    };
    return kernels_.ops.single_column(params, stream());
  }
  const cuda::SkinnyGemmParams skinny = skinny_params(weights, x, out, rows);
  if (serves_few_rows(weights, skinny)) return kernels_.multiply_few_rows(skinny, stream());
  gpu::MatmulParams params;
  params.x = x.data;
  params.weight = weights.weight;
  params.out = out.data;
  params.dtype = weights.dtype;
  params.out_dtype = out.dtype;
  params.x_stride = x.stride;
  params.weight_stride = weights.stride;
  params.out_stride = out.stride;
  params.weight_is_kn = weights.is_kn;
  params.rows = static_cast<int32_t>(rows);
  params.n = weights.n;
  params.k = weights.k;
  params.bias = bias_of(weights, out.dtype);
  products_.run(params, stream());
}

void CudaDevice::part_linear(const Linear& weights, Rows x, Rows out, int64_t rows) {
  cuda::SkinnyGemmParams skinny = skinny_params(weights, x, out, rows);
  const bool sends = !rehearses_ && ranks_.sums != nullptr && serves_few_rows(weights, skinny) &&
                     ranks_.sums->sends(rows, weights.n);
  if (!sends) return linear(weights, x, out, rows);
  skinny.boxes = ranks_.sums->boxes();
  kernels_.multiply_few_rows(skinny, stream());
  sent_ = out.data;
}

// Rows are those of the arena, which are aligned; the weight stands for them.
bool CudaDevice::joins_norms(const Linear& weights, int64_t rows) const {
  const Rows dense{const_cast<std::byte*>(weights.weight), weights.k, DType::bf16};
  return serves_few_rows(weights, skinny_params(weights, dense, dense, rows));
}

bool CudaDevice::joined_linear(const Linear& weights, const JoinedSteps& steps, Rows x, Rows out,
                               int64_t rows) {
  const cuda::SkinnyGemmParams params = joined_params(weights, steps, x, out, rows);
  if (!serves_few_rows(weights, params)) return false;
  kernels_.multiply_few_rows(params, stream());
  return true;
}

bool CudaDevice::gated_linear(const MlpParts& parts, const DeferredNorm& norm, Rows x, Rows out,
                              int64_t rows) {
  if (parts.up || parts.alternates) return false;
  const cuda::SkinnyGemmParams skinny = gated_params(parts, norm, x, out, rows);
  if (!serves_few_rows(parts.gate, skinny)) return false;
  kernels_.multiply_few_rows(skinny, stream());
  return true;
}

void CudaDevice::copy_rows(Rows from, Rows to, int64_t rows, int64_t width) {
  const auto bytes = [](int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); };
  gpu::copy_rows_on_device(to.data, from.data, {bytes(from.stride), bytes(to.stride)}, bytes(width),
                           static_cast<size_t>(rows), stream());
}

bool CudaDevice::sum_branch(const ResidualStep& step, const cuda::ResidualParams& params) {
  if (rehearses_) return false;
  if (sent_ != nullptr) {
    check_argument(
        std::exchange(sent_, nullptr) == step.branch && ranks_.sums->add_sent(params, stream()),
        "the step does not take the {} x {} branch that was sent", step.rows, step.dim);
    return true;
  }
  if (ranks_.sums != nullptr && ranks_.sums->add(params, stream())) return true;
  ranks_.communicator->all_reduce(step.branch, step.branch, step.rows * step.dim, DType::f32,
                                  ReduceOp::sum, stream());
  return false;
}

void CudaDevice::check_ranks() {
  if (!shares_model()) return;
  if (ranks_.host != nullptr) ranks_.host->check();  // notices processes that have ended
  ranks_.communicator->check();
  if (ranks_.sums != nullptr) ranks_.sums->check();
  if (context_links() != nullptr) context_links()->check();
}

void CudaDevice::end_ranks(std::string_view reason) {
  if (!shares_model()) return;
  if (ranks_.sums != nullptr) ranks_.sums->stop();
  if (context_links() != nullptr) context_links()->stop();
  ranks_.communicator->abort(reason);
}

void CudaDevice::residual(const ResidualStep& step) {
  if (step.branch == nullptr && step.normed.data == nullptr) return;
  cuda::ResidualParams params{};
  params.x = step.x;
  params.branch = step.branch;
  params.branch_factor = step.branch_factor;
  params.branch_norm = weights_of(step.branch_norm);
  params.norm = weights_of(step.norm);
  params.normed = step.normed.data;
  params.normed_stride = step.normed.stride;
  params.rows = static_cast<int32_t>(step.rows);
  params.dim = step.dim;
  if (step.branch != nullptr && step.is_part && sum_branch(step, params)) return;
  kernels_.ops.residual(params, stream());
}

void CudaDevice::prepare_head_sets(const HeadSet& first, const HeadSet& second, int64_t rows,
                                   int32_t dim, const int32_t* positions) {
  cuda::HeadSetsParams params{};
  size_t sets = 0;
  for (const HeadSet* set : {&first, &second}) {
    if (set->heads == 0 || !has_steps(set->steps)) continue;
    params.sets[sets++] = heads_params(*set, rows, dim, positions);
  }
  if (sets > 0) kernels_.ops.prepare_heads(params, stream());
}

void CudaDevice::sigmoid_gate(HeadRows x, HeadRows gate, int64_t rows, int32_t heads, int32_t dim,
                              int32_t gate_dim) {
  cuda::SigmoidGateKernelParams params{};
  params.x = x.data;
  params.gate = gate.data;
  params.x_row_stride = x.token_stride;
  params.x_head_stride = x.head_stride;
  params.gate_row_stride = gate.token_stride;
  params.gate_head_stride = gate.head_stride;
  params.x_is_f32 = x.dtype == DType::f32;
  params.gate_is_f32 = gate.dtype == DType::f32;
  params.rows = static_cast<int32_t>(rows);
  params.heads = heads;
  params.dim = dim;
  params.gate_dim = gate_dim;
  kernels_.ops.sigmoid_gate(params, stream());
}

void CudaDevice::embedding(const kernels::EmbeddingParams& embedding) {
  cuda::GatherParams params{};
  params.table = embedding.table;
  params.table_stride = embedding.dim;
  params.table_is_f32 = embedding.dtype == DType::f32;
  params.index = embedding.ids;
  params.out = embedding.out;
  params.out_stride = embedding.dim;
  params.factor = embedding.factor;
  params.table_rows = embedding.table_rows;
  params.rows = static_cast<int32_t>(embedding.rows);
  params.dim = embedding.dim;
  kernels_.ops.gather(params, stream());
}

void CudaDevice::gather_rows(const kernels::ExpertRowsParams& rows) {
  cuda::GatherParams params{};
  params.table = rows.x;
  params.table_stride = rows.x_stride;
  params.table_is_f32 = 1;
  params.index = rows.index;
  params.out = rows.out;
  params.out_stride = rows.out_stride;
  params.factor = 1;
  params.table_rows = std::numeric_limits<int32_t>::max();
  params.rows = static_cast<int32_t>(rows.rows);
  params.dim = rows.dim;
  kernels_.ops.gather(params, stream());
}

}  // namespace

std::unique_ptr<ModelDevice> make_cuda_device(const CudaDeviceOptions& options) {
  return std::make_unique<CudaDevice>(options);
}

}  // namespace fovea
