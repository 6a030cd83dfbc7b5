// SPDX-License-Identifier: Apache-2.0
#include "model/cuda_device.h"

#include <algorithm>
#include <limits>
#include <map>

#include "core/check.h"
#include "core/float_types.h"
#include "core/quote.h"
#include "core/rounding.h"
#include "gpu/cublaslt.h"
#include "kernels/cuda/store.h"
#include "model/cuda_layer_kernels.h"
#include "model/cuda_layout.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;
using kernels::MoeScore;

static_assert(static_cast<int>(MoeScore::softmax) == cuda::kScoreSoftmax &&
              static_cast<int>(MoeScore::topk_softmax) == cuda::kScoreTopkSoftmax &&
              static_cast<int>(MoeScore::sigmoid) == cuda::kScoreSigmoid &&
              static_cast<int>(MoeScore::grouped_sigmoid) == cuda::kScoreGroupedSigmoid &&
              static_cast<int>(MoeScore::grouped_softmax) == cuda::kScoreGroupedSoftmax);
static_assert(cuda::kMaxRoutedExperts == kernels::kMaxExperts);

// Generated weights are copied to the device in pieces of this size.
constexpr size_t kStagingBytes = size_t{64} << 20;

size_t aligned(size_t bytes) { return round_up(bytes, kCudaAlignment); }

class VectorMemory {
 public:
  std::byte* take(size_t bytes) {
    const VectorLayout::Place place = layout_.take(bytes);
    if (place.block == blocks_.size()) blocks_.emplace_back(layout_.blocks().back());
    return blocks_[place.block].data<std::byte>() + place.offset;
  }
  size_t bytes() const { return layout_.bytes(); }

 private:
  VectorLayout layout_;
  std::vector<gpu::DeviceBuffer> blocks_;
};

class CudaDevice final : public ModelDevice {
 public:
  explicit CudaDevice(const CudaDeviceOptions& options)
      : context_(options.index),
        kernels_(context_.info().sm, cuda::kernel_store()),
        row_invariant_(options.row_invariant),
        products_(options.row_invariant, options.max_rows) {}
  ~CudaDevice() override { context_.bind_to_free(); }

  DeviceKind kind() const override { return DeviceKind::cuda; }
  int sm() const override { return context_.info().sm; }
  ThreadPool* threads() const override { return nullptr; }
  Stream stream() const override { return stream_.get(); }
  DType activation_dtype() const override { return DType::bf16; }

  const std::byte* place(const StoredTensor& tensor, std::string_view name) override;
  const std::byte* place_joined(std::span<const StoredTensor* const> tensors,
                                std::string_view name) override;
  std::span<const float> place(std::vector<float> values) override;
  std::unique_ptr<Experts> place(std::vector<MlpParts> experts, bool weights_scale_input) override {
    return make_cuda_experts(std::move(experts), weights_scale_input, kernels_, stream());
  }
  size_t weight_bytes() const override { return matrix_bytes_ + vectors_.bytes(); }
  size_t product_bytes() const override { return products_.workspace_bytes(); }
  size_t vector_bytes(size_t count) const override { return cuda_vector_bytes(count); }
  std::shared_ptr<std::byte> allocate(size_t bytes) override;

  void linear(const Linear& weights, Rows x, Rows out, int64_t rows) override;
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
  void delta_inputs(const kernels::DeltaInputsParams& params) override;
  void gated_norm(const Norm& norm, HeadRows x, HeadRows gate, HeadRows out, int64_t rows,
                  int32_t heads) override;
  void mamba2_inputs(const kernels::Mamba2InputsParams&) override { refuse_mamba2(); }
  void norm_of_gated(const Norm&, HeadRows, HeadRows, HeadRows, int64_t, int32_t) override {
    refuse_mamba2();
  }
  void moe_routing(const kernels::MoeRoutingParams& params) override;
  void embedding(const kernels::EmbeddingParams& params) override;
  void gather_rows(const kernels::ExpertRowsParams& params) override;
  void fill_zero(float* x, int64_t count) override {
    gpu::fill_bytes(x, 0, static_cast<size_t>(count) * sizeof(float), stream());
  }
  void soft_cap(float* x, float cap, int64_t count) override {
    const cuda::SoftCapParams params{x, count, cap};
    kernels_.ops.soft_cap(params, stream());
  }

 private:
  [[noreturn]] static void refuse_mamba2() {
    fail(ErrorCode::unsupported, "Mamba2 layers of models run on the CPU only");
  }
  void copy_in(std::byte* to, const StoredTensor& tensor);
  bool serves_skinny(const Linear& weights, const cuda::SkinnyGemmParams& params) const {
    return !row_invariant_ && weights.dtype == DType::bf16 && !weights.is_kn &&
           cuda::SkinnyProducts::serves(params);
  }

  gpu::Context context_;
  gpu::OwnedStream stream_;
  CudaLayerKernels kernels_;
  bool row_invariant_;
  gpu::MatrixProducts products_;
  // Key: the address in the mapped file, or the tensor whose values are generated.
  std::map<const void*, gpu::DeviceBuffer> matrices_;
  std::vector<gpu::DeviceBuffer> joined_;
  gpu::PinnedBuffer staging_;  // empty until a tensor is generated
  size_t matrix_bytes_ = 0;
  VectorMemory vectors_;
};

void CudaDevice::copy_in(std::byte* to, const StoredTensor& tensor) {
  if (tensor.data != nullptr) {
    gpu::copy_to_device(to, tensor.data, tensor.bytes, stream());
    return;
  }
  if (staging_.bytes() == 0) staging_ = gpu::PinnedBuffer(kStagingBytes);
  for (size_t begin = 0; begin < tensor.bytes; begin += kStagingBytes) {
    const std::span piece(staging_.data<std::byte>(),
                          std::min(kStagingBytes, tensor.bytes - begin));
    tensor.read(begin, piece);
    gpu::copy_to_device(to + begin, piece.data(), piece.size(), stream());
    gpu::synchronize(stream());
  }
}

const std::byte* CudaDevice::place_joined(std::span<const StoredTensor* const> tensors,
                                          std::string_view name) {
  size_t bytes = 0;
  for (const StoredTensor* tensor : tensors) {
    check_cuda_matrix(*tensor, name);
    bytes += tensor->bytes;
  }
  gpu::DeviceBuffer buffer(bytes);
  auto* to = buffer.data<std::byte>();
  for (const StoredTensor* tensor : tensors) {
    copy_in(to, *tensor);
    to += tensor->bytes;
  }
  gpu::synchronize(stream());
  matrix_bytes_ += bytes;
  return joined_.emplace_back(std::move(buffer)).data<std::byte>();
}

const std::byte* CudaDevice::place(const StoredTensor& tensor, std::string_view name) {
  check_cuda_matrix(tensor, name);
  gpu::DeviceBuffer& buffer =
      matrices_[tensor.data != nullptr ? static_cast<const void*>(tensor.data) : &tensor];
  if (buffer.bytes() == 0) {
    buffer = gpu::DeviceBuffer(tensor.bytes);
    copy_in(buffer.data<std::byte>(), tensor);
    gpu::synchronize(stream());
    matrix_bytes_ += tensor.bytes;
  }
  return buffer.data<std::byte>();
}

std::span<const float> CudaDevice::place(std::vector<float> values) {
  std::vector<uint16_t> rounded(values.size());
  std::ranges::transform(values, rounded.begin(), float_to_bf16);
  const size_t bytes = values.size() * sizeof(float);
  std::byte* const memory = vectors_.take(cuda_vector_bytes(values.size()));
  gpu::copy_to_device(memory, values.data(), bytes, stream());
  gpu::copy_to_device(memory + aligned(bytes), rounded.data(), rounded.size() * sizeof(uint16_t),
                      stream());
  gpu::synchronize(stream());
  return {reinterpret_cast<const float*>(memory), values.size()};
}

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
  if (serves_skinny(weights, skinny)) return kernels_.skinny.run(skinny, stream());
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

// Rows are those of the arena, which are aligned; the weight stands for them.
bool CudaDevice::joins_norms(const Linear& weights, int64_t rows) const {
  const Rows dense{const_cast<std::byte*>(weights.weight), weights.k, DType::bf16};
  return serves_skinny(weights, skinny_params(weights, dense, dense, rows));
}

bool CudaDevice::joined_linear(const Linear& weights, const JoinedSteps& steps, Rows x, Rows out,
                               int64_t rows) {
  const cuda::SkinnyGemmParams params = joined_params(weights, steps, x, out, rows);
  if (!serves_skinny(weights, params)) return false;
  kernels_.skinny.run(params, stream());
  return true;
}

bool CudaDevice::gated_linear(const MlpParts& parts, const DeferredNorm& norm, Rows x, Rows out,
                              int64_t rows) {
  if (parts.up || parts.alternates) return false;
  const cuda::SkinnyGemmParams skinny = gated_params(parts, norm, x, out, rows);
  if (!serves_skinny(parts.gate, skinny)) return false;
  kernels_.skinny.run(skinny, stream());
  return true;
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

void CudaDevice::delta_inputs(const kernels::DeltaInputsParams& inputs) {
  const cuda::DeltaInputsKernelParams params{
      .qkvz = inputs.qkvz,
      .ba = inputs.ba,
      .a_log = inputs.a_log,
      .dt_bias = inputs.dt_bias,
      .mixed = inputs.mixed,
      .z = inputs.z,
      .log_decay = inputs.log_decay,
      .beta = inputs.beta,
      .rows = static_cast<int32_t>(inputs.rows),
      .key_heads = inputs.key_heads,
      .value_heads = inputs.value_heads,
      .key_dim = inputs.key_dim,
      .value_dim = inputs.value_dim,
  };
  kernels_.ops.delta_inputs(params, stream());
}

void CudaDevice::gated_norm(const Norm& norm, HeadRows x, HeadRows gate, HeadRows out, int64_t rows,
                            int32_t heads) {
  const cuda::GatedNormParams params{
      .x = static_cast<const float*>(x.data),
      .gate = static_cast<const float*>(gate.data),
      .out = out.data,
      .x_row_stride = x.token_stride,
      .x_head_stride = x.head_stride,
      .gate_row_stride = gate.token_stride,
      .gate_head_stride = gate.head_stride,
      .out_row_stride = out.token_stride,
      .out_head_stride = out.head_stride,
      .norm = weights_of(norm),
      .rows = static_cast<int32_t>(rows),
      .heads = heads,
      .dim = norm.dim(),
  };
  kernels_.ops.gated_norm(params, stream());
}

void CudaDevice::moe_routing(const kernels::MoeRoutingParams& routing) {
  cuda::RoutingParams params{};
  params.logits = routing.logits;
  params.bias = routing.bias;
  params.ids = routing.ids;
  params.weights = routing.weights;
  params.rows = static_cast<int32_t>(routing.rows);
  params.experts = routing.experts;
  params.top_k = routing.top_k;
  params.score = static_cast<int32_t>(routing.score);
  params.normalise = routing.normalise;
  params.factor = routing.factor;
  params.groups = routing.groups;
  params.top_groups = routing.top_groups;
  kernels_.ops.routing(params, stream());
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
