// SPDX-License-Identifier: Apache-2.0
// Routed experts on a GPU. For many rows: groups the choices by expert, runs two grouped products
// with the activation between them, and combines the results. For a few rows on Hopper, two
// products do all of this. The host does not know the counts, so one captured pass serves any
// routing.

#include "core/check.h"
#include "model/cuda_layer_kernels.h"
#include "model/cuda_layout.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

class CudaExperts final : public Experts {
 public:
  CudaExperts(std::vector<MlpParts> experts, bool weights_scale_input, bool row_invariant,
              const CudaLayerKernels& kernels, Stream stream)
      : count_(static_cast<int32_t>(experts.size())),
        weights_scale_input_(weights_scale_input),
        row_invariant_(row_invariant),
        kernels_(kernels),
        stream_(stream) {
    check_cuda_experts(experts);
    parts_ = experts[0];
    std::vector<cuda::ExpertMatrix> in, out;
    for (const MlpParts& expert : experts) {
      in.push_back({expert.gate.weight, expert.gate.bias});
      if (expert.up) in.push_back({expert.up.weight, expert.up.bias});
      out.push_back({expert.down.weight, expert.down.bias});
    }
    in_ = gpu::to_device(in, stream);
    out_ = gpu::to_device(out, stream);
  }

  size_t scratch_bytes(int64_t rows, int32_t top_k) const override {
    Arena counter(DType::bf16);
    cuda_expert_buffers(counter, parts_, count_, rows, top_k);
    return counter.used();
  }

  void run(const ExpertChoice& choice, Rows x, Rows out, int64_t rows, bool adds,
           std::byte* scratch) const override {
    if (rows == 0) return;
    Arena arena(DType::bf16, {scratch, scratch_bytes(rows, choice.top_k)});
    const CudaExpertBuffers lists = cuda_expert_buffers(arena, parts_, count_, rows, choice.top_k);
    if (run_few_rows(choice, x, out, rows, adds, lists.activated)) return;
    const cuda::GroupParams group{
        choice.ids, lists.counts, lists.choices, static_cast<int32_t>(rows), count_, choice.top_k};
    kernels_.ops.group_choices(group, stream_);

    cuda::ExpertGemmParams gemm = products(lists, rows, choice.top_k);
    gemm.x = x.data;
    gemm.x_stride = x.stride;
    gemm.source_is_row = 1;
    gemm.scale = weights_scale_input_ ? choice.weights : nullptr;
    multiply(gemm, parts_.gate, in_, parts_.up ? 2 : 1, lists.hidden);
    launch_gated_activation(kernels_.ops, parts_, lists.hidden, lists.activated,
                            rows * choice.top_k, stream_);
    gemm.x = lists.activated.data;
    gemm.x_stride = lists.activated.stride;
    gemm.source_is_row = 0;
    gemm.scale = nullptr;
    multiply(gemm, parts_.down, out_, 1, lists.results);

    const cuda::CombineParams combine{choice.ids,
                                      weights_scale_input_ ? nullptr : choice.weights,
                                      lists.results.floats(),
                                      out.floats(),
                                      static_cast<int32_t>(rows),
                                      choice.top_k,
                                      parts_.down.n,
                                      adds};
    kernels_.ops.combine(combine, stream_);
  }

 private:
  // Runs the products of a few rows. Returns false, and does nothing, if they are too many, or if
  // all numbers of rows shall have the same bits.
  bool run_few_rows(const ExpertChoice& choice, Rows x, Rows out, int64_t rows, bool adds,
                    Rows activated) const {
    if (row_invariant_) return false;
    cuda::SkinnyExpertsParams gated = few_rows(choice, rows, parts_.gate, in_);
    gated.x = x.data;
    gated.x_stride = x.stride;
    gated.scale = weights_scale_input_ ? choice.weights : nullptr;
    gated.out = activated.data;
    gated.out_stride = activated.stride;
    gated.n = parts_.width();
    gated.matrices = parts_.up ? 2 : 1;
    if (parts_.alternates) gated.column_step = 2;
    if (!parts_.up) gated.up_column = parts_.alternates ? 1 : parts_.width();
    gated.activation = static_cast<int32_t>(parts_.activation);
    gated.alpha = parts_.bounds.alpha;
    gated.limit = parts_.bounds.limit;

    cuda::SkinnyExpertsParams combined = few_rows(choice, rows, parts_.down, out_);
    combined.x = activated.data;
    combined.x_stride = activated.stride;
    combined.scale = weights_scale_input_ ? nullptr : choice.weights;
    combined.out = out.data;
    combined.out_stride = out.stride;
    combined.n = parts_.down.n;
    combined.adds = adds;

    const cuda::ExpertProducts& products = kernels_.skinny_experts;
    if (!products.serves(gated, parts_.gate.is_kn) ||
        !products.serves(combined, parts_.down.is_kn)) {
      return false;
    }
    products.run(cuda::ExpertProduct::gated, gated, parts_.gate.is_kn, stream_);
    products.run(cuda::ExpertProduct::combined, combined, parts_.down.is_kn, stream_);
    return true;
  }
  // Describes what both products have in common.
  cuda::SkinnyExpertsParams few_rows(const ExpertChoice& choice, int64_t rows, const Linear& shape,
                                     const gpu::DeviceBuffer& weights) const {
    cuda::SkinnyExpertsParams params{};
    params.weights = weights.data<cuda::ExpertMatrix>();
    params.weight_stride = static_cast<int32_t>(shape.stride);
    params.ids = choice.ids;
    params.rows = static_cast<int32_t>(rows);
    params.top_k = choice.top_k;
    params.experts = count_;
    params.matrices = params.column_step = 1;
    params.k = shape.k;
    return params;
  }

  static cuda::ExpertGemmParams products(const CudaExpertBuffers& lists, int64_t rows,
                                         int32_t top_k) {
    cuda::ExpertGemmParams gemm{};
    gemm.counts = lists.counts;
    gemm.list = lists.choices;
    gemm.rows = static_cast<int32_t>(rows);
    gemm.top_k = top_k;
    return gemm;
  }

  void multiply(cuda::ExpertGemmParams gemm, const Linear& shape, const gpu::DeviceBuffer& weights,
                int32_t matrices, Rows out) const {
    gemm.weights = weights.data<cuda::ExpertMatrix>();
    gemm.weight_stride = shape.stride;
    gemm.out = out.data;
    gemm.out_stride = out.stride;
    gemm.out_is_f32 = out.dtype == DType::f32;
    gemm.matrices = matrices;
    gemm.n = shape.n;
    gemm.k = shape.k;
    kernels_.expert_gemm.run(gemm, count_, shape.is_kn, stream_);
  }

  MlpParts parts_;  // parts of the first expert; all have the same shape
  int32_t count_;
  bool weights_scale_input_, row_invariant_;
  const CudaLayerKernels& kernels_;
  Stream stream_;
  gpu::DeviceBuffer in_, out_;
};

}  // namespace

std::unique_ptr<Experts> make_cuda_experts(std::vector<MlpParts> experts, bool weights_scale_input,
                                           bool row_invariant, const CudaLayerKernels& kernels,
                                           Stream stream) {
  return std::make_unique<CudaExperts>(std::move(experts), weights_scale_input, row_invariant,
                                       kernels, stream);
}

}  // namespace fovea
