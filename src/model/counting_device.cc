// SPDX-License-Identifier: Apache-2.0
#include "model/counting_device.h"

#include <set>

#include "core/check.h"
#include "gpu/cublaslt.h"
#include "model/cuda_layout.h"
#include "model/host_experts.h"

namespace fovea {
namespace {

[[noreturn]] void refuse() {
  fail(ErrorCode::unsupported, "this device only counts what a model would take");
}

// Experts on a GPU, reduced to their shape.
class CountedExperts final : public Experts {
 public:
  explicit CountedExperts(const std::vector<MlpParts>& experts)
      : shape_(experts.at(0)), count_(static_cast<int64_t>(experts.size())) {}
  size_t scratch_bytes(int64_t rows, int32_t top_k) const override {
    Arena counter(DType::bf16);
    cuda_expert_buffers(counter, shape_, count_, rows, top_k);
    return counter.used();
  }
  void run(const ExpertChoice&, Rows, Rows, int64_t, bool, std::byte*) const override { refuse(); }

 private:
  MlpParts shape_;
  int64_t count_;
};

class CountingDevice final : public ModelDevice {
 public:
  CountingDevice(const DeviceInfo& device, const ModelRanks& ranks)
      : device_(device), ranks_(ranks) {}

  DeviceKind kind() const override { return device_.kind; }
  int sm() const override { return device_.sm; }
  ThreadPool* threads() const override { return nullptr; }
  Stream stream() const override { return nullptr; }
  DType activation_dtype() const override { return on_gpu() ? DType::bf16 : DType::f32; }
  Communicator* ranks() const override { return ranks_.communicator; }
  bool shares_contexts() const override { return ranks_.share_contexts; }
  bool divides_experts() const override { return ranks_.divide_experts; }

  const std::byte* place(const StoredTensor& tensor, std::string_view name) override {
    if (on_gpu()) check_cuda_matrix(tensor, name);
    if (!on_gpu() && tensor.data != nullptr) return tensor.data;  // the CPU uses the mapped bytes
    const void* const key =
        tensor.data != nullptr ? static_cast<const void*>(tensor.data) : &tensor;
    if (placed_.insert(key).second) matrix_bytes_ += tensor.bytes;
    return nowhere();
  }
  const std::byte* place_joined(std::span<const StoredTensor* const> tensors,
                                std::string_view name) override {
    if (!on_gpu() || ranks() != nullptr) return nullptr;
    for (const StoredTensor* tensor : tensors) {
      check_cuda_matrix(*tensor, name);
      matrix_bytes_ += tensor->bytes;
    }
    return nowhere();
  }
  // Counts as CudaDevice does.
  const std::byte* locate(const StoredTensor& tensor, std::string_view name) override {
    if (!places_parts()) return place(tensor, name);
    check_cuda_matrix(tensor, name);
    return nowhere();
  }
  Linear place_part(const Linear& part) override {
    return places_parts() ? count_parts({&part, 1}) : part;
  }
  Linear join_parts(std::span<const Linear> parts) override {
    return places_parts() && !parts[0].is_kn ? count_parts(parts) : Linear{};
  }
  std::vector<float> read(std::span<const float> placed) const override {
    return std::vector<float>(placed.size());
  }
  std::span<const float> place(std::vector<float> values) override {
    if (on_gpu()) {
      vectors_.take(cuda_vector_bytes(values.size()));
    } else {
      matrix_bytes_ += values.size() * sizeof(float);
    }
    return {reinterpret_cast<const float*>(nowhere()), values.size()};
  }
  const int32_t* place_ints(std::vector<int32_t> values) override {
    const size_t bytes = values.size() * sizeof(int32_t);
    if (on_gpu()) {
      vectors_.take(bytes);
    } else {
      matrix_bytes_ += bytes;
    }
    return reinterpret_cast<const int32_t*>(nowhere());
  }
  std::unique_ptr<Experts> place(std::vector<MlpParts> experts, bool weights_scale_input) override {
    if (!on_gpu()) return make_host_experts(std::move(experts), weights_scale_input, *this);
    check_cuda_experts(experts);
    return std::make_unique<CountedExperts>(experts);
  }
  size_t weight_bytes() const override { return matrix_bytes_ + vectors_.bytes(); }
  size_t product_bytes() const override { return on_gpu() ? gpu::kProductWorkspace : 0; }

  size_t vector_bytes(size_t count) const override {
    return on_gpu() ? cuda_vector_bytes(count) : count * sizeof(float);
  }

  std::shared_ptr<std::byte> allocate(size_t) override { refuse(); }
  void linear(const Linear&, Rows, Rows, int64_t) override { refuse(); }
  void residual(const ResidualStep&) override { refuse(); }
  void prepare_heads(const HeadSteps&, HeadRows, int64_t, int32_t, int32_t,
                     const int32_t*) override {
    refuse();
  }
  void gated_activation(const MlpParts&, Rows, Rows, int64_t) override { refuse(); }
  void sigmoid_gate(HeadRows, HeadRows, int64_t, int32_t, int32_t, int32_t) override { refuse(); }
  void delta_inputs(const kernels::DeltaInputsParams&) override { refuse(); }
  void mamba2_inputs(const kernels::Mamba2InputsParams&) override { refuse(); }
  void kda_gates(const kernels::KdaGatesParams&) override { refuse(); }
  void silu_gate(Rows, Rows, Rows, int64_t, int64_t) override { refuse(); }
  void multiply(Rows, Rows, Rows, int64_t, int64_t) override { refuse(); }
  void softplus(float*, int64_t) override { refuse(); }
  void gated_norm(const GatedNorm&, HeadRows, HeadRows, HeadRows, int64_t, int32_t) override {
    refuse();
  }
  void divided_norm_squares(const DividedNorm&) override { refuse(); }
  void divided_norm_scale(const DividedNorm&) override { refuse(); }
  void moe_routing(const kernels::MoeRoutingParams&) override { refuse(); }
  void embedding(const kernels::EmbeddingParams&) override { refuse(); }
  void gather_rows(const kernels::ExpertRowsParams&) override { refuse(); }
  void store_rows(Rows, Rows, const int64_t*, int64_t, int64_t) override { refuse(); }
  void spread_columns(Rows, Rows, const int32_t*, int64_t, int64_t) override { refuse(); }
  void copy_rows(Rows, Rows, int64_t, int64_t) override { refuse(); }
  void soft_cap(float*, float, int64_t) override { refuse(); }

 private:
  bool on_gpu() const { return device_.kind == DeviceKind::cuda; }
  bool places_parts() const { return on_gpu() && ranks() != nullptr; }
  Linear count_parts(std::span<const Linear> parts) {
    Linear placed = parts[0];
    size_t biases = 0;
    placed.n = 0;
    for (const Linear& part : parts) {
      matrix_bytes_ +=
          static_cast<size_t>(part.n) * static_cast<size_t>(part.k) * dtype_bytes(part.dtype);
      placed.n += part.n;
      if (part.bias != nullptr) biases += static_cast<size_t>(part.n);
    }
    placed.stride = placed.is_kn ? placed.n : placed.k;
    placed.weight = nowhere();
    if (biases > 0) placed.bias = place(std::vector<float>(biases)).data();
    return placed;
  }
  static const std::byte* nowhere() { return reinterpret_cast<const std::byte*>(kCudaAlignment); }

  DeviceInfo device_;
  const ModelRanks ranks_;
  std::set<const void*> placed_;
  size_t matrix_bytes_ = 0;
  VectorLayout vectors_;
};

}  // namespace

std::unique_ptr<ModelDevice> make_counting_device(const DeviceInfo& device,
                                                  const ModelRanks& ranks) {
  return std::make_unique<CountingDevice>(device, ranks);
}

}  // namespace fovea
