// SPDX-License-Identifier: Apache-2.0
// Operations between the matrix products of a model: norms, rotary positions, activations, expert
// routing. They work on f32 rows, in place or out of place, and allocate nothing. Every output row
// depends on the same input row only, so its bits depend neither on the rest of the batch nor on
// the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/dtype.h"
#include "fovea/thread_pool.h"

namespace fovea::kernels {

// f32 [rows, heads, dim]; the values of a head are contiguous. Rows without heads have heads = 1.
struct HeadView {
  float* data = nullptr;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// The function of a gate around a norm.
enum class NormGate : uint8_t {
  silu,         // norm(x) * silu(gate)
  sigmoid,      // norm(x) * sigmoid(gate)
  silu_before,  // norm(x * silu(gate))
};

// y = x / sqrt(mean(x^2) + epsilon) * weight (RMSNorm, arXiv:1910.07467), over dim, with a gate if
// one is given.
struct RmsNormParams {
  HeadView x;
  HeadView out;   // may be x
  HeadView gate;  // data null: none; must not be out
  NormGate gate_function = NormGate::silu;
  const float* weight = nullptr;   // [dim]; null: no weight (l2 norm)
  int64_t weight_head_stride = 0;  // elements between the weights of heads; 0: all have the same
  bool weight_plus_one = false;    // times (1 + weight), as Gemma stores it
  float epsilon = 0;
  int64_t rows = 0;
  int32_t heads = 1;
  int32_t dim = 0;
};
void rms_norm(const RmsNormParams& params, ThreadPool& threads);

// RMSNorm of x, or of x * silu(gate), in two steps, between which others add the squares of their
// values: a row has `parts` times `dim` values, of which these are a part.
struct DividedNormParams {
  const float* x = nullptr;
  int64_t x_row_stride = 0;
  const float* gate = nullptr;  // null: none
  int64_t gate_row_stride = 0;
  float* out = nullptr;  // may be x
  int64_t out_row_stride = 0;
  float* squares = nullptr;       // [rows]
  const float* weight = nullptr;  // [dim]
  bool weight_plus_one = false;
  float epsilon = 0;
  int64_t rows = 0;
  int32_t dim = 0;
  int32_t parts = 1;
};
// Writes `squares`, the sums over the values that are here.
void divided_norm_squares(const DividedNormParams& params, ThreadPool& threads);
// Writes `out` from `squares`, the sums over all values of the rows.
void divided_norm_scale(const DividedNormParams& params, ThreadPool& threads);

enum class RopeScaling : uint8_t {
  none,
  linear,    // positions / factor
  dynamic,   // no scaling up to the model's original length, which is the limit
  llama3,    // Llama 3.1: long wavelengths / factor, blended between the two frequency bounds
  yarn,      // arXiv:2309.00071
  longrope,  // arXiv:2402.13753: each frequency / its own factor
};

// Rotary frequencies, as defined by Hugging Face's `rope_parameters`.
struct RopeSpec {
  int32_t rotary_dim = 0;  // leading dims of a head that rotate, even
  double theta = 10000;
  RopeScaling scaling = RopeScaling::none;
  double factor = 1;
  int32_t original_max_positions = 0;  // llama3, yarn, longrope
  double beta_fast = 32, beta_slow = 1;
  bool truncate = true;  // yarn: whole dims as bounds of the blend
  // Factor of cos and sin. 0: yarn takes it from mscale and mscale_all_dim if both are set, else
  // 0.1 ln(factor) + 1; longrope takes sqrt(1 + ln(factor) / ln(original_max_positions)).
  double attention_factor = 0;
  double mscale = 0, mscale_all_dim = 0;
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  // longrope, [rotary_dim / 2]: factors for tables of up to original_max_positions and longer ones.
  std::vector<double> short_factors, long_factors;
};

// cos and sin, each [max_positions, rotary_dim / 2]; cos null: none.
struct RopeTableView {
  const float* cos = nullptr;
  const float* sin = nullptr;
  int32_t max_positions = 0;
  int32_t rotary_dim = 0;
};

// Makes the tables, scaled by the attention factor. The angle is the product of f32 frequency and
// f32 position, as in training.
struct RopeTable {
  int32_t max_positions = 0;
  int32_t rotary_dim = 0;
  std::vector<float> cos, sin;

  RopeTableView view() const { return {cos.data(), sin.data(), max_positions, rotary_dim}; }
};
RopeTable make_rope_table(const RopeSpec& spec, int32_t max_positions);

// Returns 0.1 mscale ln(factor) + 1, or 1 for factor <= 1. DeepSeek multiplies the softmax scale by
// its square.
double yarn_mscale(double factor, double mscale);

enum class RopeLayout : uint8_t {
  half_split,   // dim i rotates with i + rotary_dim / 2 (NeoX, Llama)
  interleaved,  // dim 2i with 2i + 1 (GPT-J, Llama 4, DeepSeek); results stay in place
};

struct RopeParams {
  HeadView x;  // rotated in place; dims from rotary_dim on do not change
  RopeTableView table;
  RopeLayout layout = RopeLayout::half_split;
  const int32_t* positions = nullptr;  // [rows], in [0, max_positions)
  int64_t rows = 0;
  int32_t heads = 1;
};
void rope(const RopeParams& params, ThreadPool& threads);

enum class Activation : uint8_t {
  silu,            // silu(gate) * up
  gelu_tanh,       // gelu, tanh approximation
  clamped_swiglu,  // gpt-oss: (up + 1) gate sigmoid(alpha gate); gate <= limit, |up| <= limit
};

// Constants of clamped_swiglu.
struct SwigluBounds {
  float alpha = 1.702f;
  float limit = 7;

  bool operator==(const SwigluBounds&) const = default;
};

// out[r, i] = activation(gate[r, i]) * up[r, i].
struct GatedActivationParams {
  Activation activation = Activation::silu;
  const float* gate = nullptr;
  const float* up = nullptr;
  int64_t in_row_stride = 0;
  int32_t in_step = 1;   // elements between columns; 2: gate and up columns alternate
  float* out = nullptr;  // may be gate or up if in_step is 1
  int64_t out_row_stride = 0;
  int64_t rows = 0;
  int32_t dim = 0;
  SwigluBounds bounds;  // clamped_swiglu
};
void gated_activation(const GatedActivationParams& params, ThreadPool& threads);

// x[r, h, i] *= sigmoid(gate[r, h, i]); gate_dim 1: one gate for all dims of a head.
struct SigmoidGateParams {
  HeadView x;
  HeadView gate;
  int64_t rows = 0;
  int32_t heads = 1;
  int32_t dim = 0;
  int32_t gate_dim = 0;  // dim or 1
};
void sigmoid_gate(const SigmoidGateParams& params, ThreadPool& threads);

// Gates of a gated delta net: log_decay = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b).
struct DeltaGateParams {
  const float* a = nullptr;  // [rows, heads]
  const float* b = nullptr;  // [rows, heads]
  int64_t a_row_stride = 0, b_row_stride = 0;
  const float* a_log = nullptr;    // [heads]
  const float* dt_bias = nullptr;  // [heads]
  float* log_decay = nullptr;      // [rows, heads], dense
  float* beta = nullptr;           // [rows, heads], dense
  int64_t rows = 0;
  int32_t heads = 0;
};
void delta_gates(const DeltaGateParams& params, ThreadPool& threads);

// The inputs of a gated delta net from its projections, which are grouped by key head: a row of
// qkvz holds [q | k | values | gates] of each key head, a row of ba [b | a] of its value heads.
// Gates of the recurrence are those of DeltaGateParams.
struct DeltaInputsParams {
  const float* qkvz = nullptr;     // [rows, 2 * (keys + values)], keys = key_heads * key_dim, ...
  const float* ba = nullptr;       // [rows, 2 * value_heads]
  const float* a_log = nullptr;    // [value_heads]
  const float* dt_bias = nullptr;  // [value_heads]
  float* mixed = nullptr;          // [rows, 2 * keys + values]: all q, all k, all values
  float* z = nullptr;              // [rows, values]: the gates of the results
  float* log_decay = nullptr;      // [rows, value_heads]
  float* beta = nullptr;           // [rows, value_heads]
  int64_t rows = 0;
  int32_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
};
void delta_inputs(const DeltaInputsParams& params, ThreadPool& threads);

// The inputs of a Mamba2 layer from its projection, whose rows hold [z | x, B, C | dt]: dt =
// clamp(softplus(dt + dt_bias), dt_min, dt_max), log_decay = -exp(a_log) dt.
struct Mamba2InputsParams {
  const float* projected = nullptr;  // [rows, values + conv_dim + heads]
  const float* a_log = nullptr;      // [heads]
  const float* dt_bias = nullptr;    // [heads]
  float dt_min = 0, dt_max = 0;
  float* z = nullptr;          // [rows, values]
  float* mixed = nullptr;      // [rows, conv_dim]: x, B, C
  float* log_decay = nullptr;  // [rows, heads]
  float* dt = nullptr;         // [rows, heads]
  int64_t rows = 0;
  int32_t values = 0, conv_dim = 0, heads = 0;
};
void mamba2_inputs(const Mamba2InputsParams& params, ThreadPool& threads);

// The gates of a KDA layer from its projections, in place: log_decay becomes -exp(a_log)
// softplus(log_decay + dt_bias), beta becomes sigmoid(beta).
struct KdaGatesParams {
  const float* a_log = nullptr;    // [heads]
  const float* dt_bias = nullptr;  // [heads, key_dim]
  float* log_decay = nullptr;      // [rows, heads, key_dim]
  float* beta = nullptr;           // [rows, heads]
  int64_t rows = 0;
  int32_t heads = 0, key_dim = 0;
};
void kda_gates(const KdaGatesParams& params, ThreadPool& threads);

// out[r, i] = x[r, i] * silu(gate[r, i]), with `plain` x[r, i] * gate[r, i]; x[r, i] without a
// gate.
struct SiluGateParams {
  const float* x = nullptr;
  const float* gate = nullptr;  // or null
  bool plain = false;
  float* out = nullptr;  // may be x or gate
  int64_t x_row_stride = 0, gate_row_stride = 0, out_row_stride = 0;
  int64_t rows = 0;
  int32_t dim = 0;
};
void silu_gate(const SiluGateParams& params, ThreadPool& threads);

// These work on `count` dense elements.
void softplus(float* x, int64_t count, ThreadPool& threads);  // ln(1 + e^x)
void add(float* x, const float* y, float factor, int64_t count,
         ThreadPool& threads);                                           // x += factor * y
void soft_cap(float* x, float cap, int64_t count, ThreadPool& threads);  // cap * tanh(x / cap)

// The attention temperature of Llama 4: 1 + factor * ln(1 + floor((position + 1) / floor_scale)).
struct PositionScale {
  float factor = 0;
  float floor_scale = 1;
};

// x[r, h, :] *= the scale at positions[r].
struct ScaleRowsParams {
  HeadView x;
  PositionScale scale;
  const int32_t* positions = nullptr;  // [rows]
  int64_t rows = 0;
  int32_t heads = 1;
  int32_t dim = 0;
};
void scale_rows(const ScaleRowsParams& params, ThreadPool& threads);

// out[r] = table[ids[r]] * factor. Throws Error for an id outside [0, table_rows).
struct EmbeddingParams {
  const void* table = nullptr;  // [table_rows, dim], any alignment
  DType dtype = DType::f32;     // f32, bf16 or f16
  int64_t table_rows = 0;
  const int32_t* ids = nullptr;  // [rows]
  float* out = nullptr;          // [rows, dim], dense
  int64_t rows = 0;
  int32_t dim = 0;
  float factor = 1;
};
void embedding(const EmbeddingParams& params, ThreadPool& threads);

// Mixture of experts: the rows of one expert are gathered, multiplied and added back. If experts
// are called in the order of their numbers, each row is summed in that order.
struct ExpertRowsParams {
  const float* x = nullptr;
  int64_t x_stride = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
  const int32_t* index = nullptr;  // [rows]; no row twice
  const float* weight = nullptr;   // [rows] or null: 1
  int64_t rows = 0;
  int32_t dim = 0;
};
// out[r] = weight x[index[r]]
void gather_rows(const ExpertRowsParams& params, ThreadPool& threads);
// out[index[r]] += weight x[r]
void scatter_add_rows(const ExpertRowsParams& params, ThreadPool& threads);

enum class MoeScore : uint8_t {
  softmax,          // softmax over all experts, then top-k (Mixtral, Qwen)
  topk_softmax,     // top-k logits, then softmax over them (gpt-oss)
  sigmoid,          // top-k logits, then sigmoid of each (Llama 4)
  grouped_sigmoid,  // sigmoid + bias inside the best groups, weights without bias (DeepSeek-V3,
                    // arXiv:2412.19437)
  grouped_softmax,  // softmax over all experts, top-k inside the best groups (DeepSeek-V2,
                    // arXiv:2405.04434)
};

constexpr int32_t kMaxExperts = 1024;

struct MoeRoutingParams {
  MoeScore score = MoeScore::softmax;
  const float* logits = nullptr;  // [rows, experts], dense
  int64_t rows = 0;
  int32_t experts = 0;  // <= kMaxExperts
  int32_t top_k = 0;
  bool normalise = false;  // softmax and grouped: the chosen weights sum to 1
  // Added to the sum by which they are divided. The default guards against an all-zero row, as in
  // DeepSeek, and does not change other rows.
  float sum_epsilon = 1e-20f;
  float factor = 1;             // then every weight times this
  const float* bias = nullptr;  // grouped_sigmoid: [experts], added for the choice only; or null
  // grouped: equal runs of experts, ranked by their best two scores (sigmoid) or their best
  // (softmax).
  int32_t groups = 1;
  int32_t top_groups = 1;
  // The experts that this rank has: ids are their places among these, -1 for all others.
  int32_t first_own = 0, own = kMaxExperts;
  int32_t* ids = nullptr;    // [rows, top_k], best first; equal scores: lower expert first
  float* weights = nullptr;  // [rows, top_k]
};
void moe_routing(const MoeRoutingParams& params, ThreadPool& threads);

}  // namespace fovea::kernels
