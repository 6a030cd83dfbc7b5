// SPDX-License-Identifier: Apache-2.0
#include "model/cuda_layer_kernels.h"

#include "core/check.h"
#include "core/rounding.h"
#include "model/cuda_layout.h"

namespace fovea {

namespace cuda = kernels::cuda;
using kernels::Activation;
using kernels::MoeScore;

static_assert(static_cast<int>(Activation::silu) == cuda::kSilu &&
              static_cast<int>(Activation::gelu_tanh) == cuda::kGeluTanh &&
              static_cast<int>(Activation::clamped_swiglu) == cuda::kClampedSwiglu);
static_assert(static_cast<int>(MoeScore::softmax) == cuda::kScoreSoftmax &&
              static_cast<int>(MoeScore::topk_softmax) == cuda::kScoreTopkSoftmax &&
              static_cast<int>(MoeScore::sigmoid) == cuda::kScoreSigmoid &&
              static_cast<int>(MoeScore::grouped_sigmoid) == cuda::kScoreGroupedSigmoid &&
              static_cast<int>(MoeScore::grouped_softmax) == cuda::kScoreGroupedSoftmax);
static_assert(cuda::kMaxRoutedExperts == kernels::kMaxExperts);

static_assert(sums_of_squares(33) == cuda::squares_of(33));
static_assert(kMaxJoinedRows == cuda::NarrowProducts::kMaxRows);

namespace {

constexpr int32_t kMaxHeadDim = 2048;  // HeadsConfig::kMaxDim

bool has_more_than_norm(const HeadSteps& steps) {
  return steps.rotary || steps.l2_epsilon || steps.scale.factor != 0;
}

}  // namespace

bool CudaLayerKernels::serves_few_rows(const cuda::SkinnyGemmParams& params) const {
  return cuda::SkinnyProducts::serves(params) || narrow.serves(params);
}

void CudaLayerKernels::multiply_few_rows(const cuda::SkinnyGemmParams& params,
                                         Stream stream) const {
  if (cuda::SkinnyProducts::serves(params)) return skinny.run(params, stream);
  narrow.run(params, stream);
}

cuda::NormWeights weights_of(const Norm& norm) {
  return {norm.weight.data(), norm.epsilon, norm.plus_one ? 1.0f : 0.0f};
}

const void* bias_of(const Linear& weights, DType out) {
  if (weights.bias == nullptr) return nullptr;
  const size_t f32_bytes = static_cast<size_t>(weights.n) * sizeof(float);
  const size_t offset = out == DType::f32 ? 0 : round_up(f32_bytes, kCudaAlignment);
  return reinterpret_cast<const std::byte*>(weights.bias) + offset;
}

cuda::SkinnyGemmParams skinny_params(const Linear& weights, Rows x, Rows out, int64_t rows) {
  cuda::SkinnyGemmParams params{};
  params.x = x.data;
  params.weight = weights.weight;
  params.bias = bias_of(weights, out.dtype);
  params.out = out.data;
  params.x_stride = x.stride;
  params.weight_stride = weights.stride;
  params.out_stride = out.stride;
  params.rows = static_cast<int32_t>(rows);
  params.n = weights.n;
  params.k = weights.k;
  params.out_is_f32 = out.dtype == DType::f32;
  return params;
}

cuda::SkinnyGemmParams joined_params(const Linear& weights, const JoinedSteps& steps, Rows x,
                                     Rows out, int64_t rows) {
  const ResidualStep& after = steps.after;
  const bool adds = after.x != nullptr;
  cuda::SkinnyGemmParams params = skinny_params(weights, x, adds ? after.normed : out, rows);
  params.in_squares = steps.before.squares;
  params.in_epsilon = steps.before.epsilon;
  if (!adds) return params;
  params.bias = weights.bias;
  params.stream = after.x;
  params.stream_factor = after.branch_factor;
  params.norm = weights_of(after.norm);
  params.squares = steps.squares;
  return params;
}

cuda::SkinnyGemmParams gated_params(const MlpParts& parts, const DeferredNorm& norm, Rows x,
                                    Rows out, int64_t rows) {
  cuda::SkinnyGemmParams params = skinny_params(parts.gate, x, out, rows);
  params.n = params.up_offset = parts.width();
  params.activation = static_cast<int32_t>(parts.activation);
  params.alpha = parts.bounds.alpha;
  params.limit = parts.bounds.limit;
  params.in_squares = norm.squares;
  params.in_epsilon = norm.epsilon;
  return params;
}

cuda::RoutingParams to_kernel(const kernels::MoeRoutingParams& routing) {
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
  params.sum_epsilon = routing.sum_epsilon;
  params.factor = routing.factor;
  params.groups = routing.groups;
  params.top_groups = routing.top_groups;
  params.first_own = routing.first_own;
  params.own = routing.own;
  return params;
}

bool has_steps(const HeadSteps& steps) { return steps.norm || has_more_than_norm(steps); }

cuda::HeadsParams heads_params(const HeadSet& set, int64_t rows, int32_t dim,
                               const int32_t* positions) {
  const HeadSteps& steps = set.steps;
  if (dim > kMaxHeadDim && has_more_than_norm(steps)) {
    fail(ErrorCode::unsupported, "a head has {} dims, at most {} on a GPU", dim, kMaxHeadDim);
  }
  cuda::HeadsParams params{};
  params.x = set.x.data;
  params.row_stride = set.x.token_stride;
  params.head_stride = set.x.head_stride;
  params.positions = positions;
  params.norm = weights_of(steps.norm);
  if (steps.rotary) {
    const kernels::RopeTableView& table = *steps.rotary.table;
    params.rotary = {table.cos, table.sin, table.max_positions, table.rotary_dim,
                     steps.rotary.layout == kernels::RopeLayout::interleaved};
  }
  params.l2_epsilon = steps.l2_epsilon.value_or(-1.0f);
  params.position_scale = steps.scale.factor;
  params.floor_scale = steps.scale.floor_scale;
  params.rows = static_cast<int32_t>(rows);
  params.heads = set.heads;
  params.dim = dim;
  return params;
}

void launch_gated_activation(const cuda::LayerOps& ops, const MlpParts& parts, Rows in, Rows out,
                             int64_t rows, Stream stream) {
  cuda::GatedParams params{};
  const auto* const gates = static_cast<const uint16_t*>(in.data);
  params.gate = gates;
  params.up = gates + (parts.alternates ? 1 : parts.width());
  params.out = out.data;
  params.in_stride = in.stride;
  params.out_stride = out.stride;
  params.in_step = parts.alternates ? 2 : 1;
  params.activation = static_cast<int32_t>(parts.activation);
  params.alpha = parts.bounds.alpha;
  params.limit = parts.bounds.limit;
  params.rows = rows;
  params.dim = parts.width();
  ops.gated_activation(params, stream);
}

}  // namespace fovea
