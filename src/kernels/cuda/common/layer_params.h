// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of the kernels between attention and the matrix products of a model, read by
// host and device code alike. "Activations" are bf16; everything else is f32.
#pragma once

#include "kernels/cuda/common/rotary.h"

namespace fovea::kernels::cuda {

struct NormWeights {
  const float* weight;  // [dim]; null: no norm
  float epsilon;
  float plus;  // the norm is times (plus + weight): 1 if the checkpoint stores weight - 1
};

// x += branch_factor * [branch_norm](branch), then normed = norm(x). One CTA a row.
struct ResidualParams {
  float* x;             // [rows, dim]
  const float* branch;  // [rows, dim] or null
  float branch_factor;
  NormWeights branch_norm;
  NormWeights norm;
  void* normed;  // activations [rows, dim] or null; without a norm they are x
  int64_t normed_stride;
  int32_t rows;
  int32_t dim;
};

// Steps of a row's heads, in place and in this order: norm, rotation, norm without weights, scale.
// Heads of more than HeadsConfig::kMaxDim dims have the norm only.
struct HeadsParams {
  void* x;  // activations [rows, heads, dim]
  int64_t row_stride, head_stride;
  const int32_t* positions;  // [rows]; null if no step needs them
  NormWeights norm;
  RotaryParams rotary;
  float l2_epsilon;      // < 0: no such norm
  float position_scale;  // 0: none
  float floor_scale;
  int32_t rows, heads, dim;
};

// Two sets of heads of equal rows, such as those of q and k. The second may have no heads.
struct HeadSetsParams {
  HeadsParams sets[2];
};

// As Activation in kernels/layer_ops.h.
enum GatedActivation : int32_t { kSilu, kGeluTanh, kClampedSwiglu };

struct GatedParams {
  const void* gate;  // activations, `in_step` apart
  const void* up;
  void* out;
  int64_t in_stride, out_stride;  // between rows
  int32_t in_step;
  int32_t activation;
  float alpha, limit;
  int64_t rows;
  int32_t dim;
};

// x[r, h, :] *= sigmoid(gate[r, h, :]), one gate for all dims with gate_dim 1. Rows are f32 or
// activations.
struct SigmoidGateKernelParams {
  void* x;
  const void* gate;
  int64_t x_row_stride, x_head_stride, gate_row_stride, gate_head_stride;
  int32_t x_is_f32, gate_is_f32;
  int32_t rows, heads, dim, gate_dim;
};

// out[r] = x[r] weight + bias. One warp a row.
struct SingleColumnParams {
  const void* x;       // activations [rows, k]
  const void* weight;  // bf16, at intervals of weight_step
  const float* bias;   // [1] or null
  void* out;           // activations, or f32
  int64_t x_stride, weight_step, out_stride;
  int32_t rows, k;
  int32_t out_is_f32;
};

// As DeltaInputsParams in kernels/layer_ops.h.
struct DeltaInputsKernelParams {
  const float* qkvz;
  const float* ba;
  const float* a_log;
  const float* dt_bias;
  float* mixed;
  float* z;
  float* log_decay;
  float* beta;
  int32_t rows, key_heads, value_heads, key_dim, value_dim;
};

// As Mamba2InputsParams in kernels/layer_ops.h.
struct Mamba2InputsKernelParams {
  const float* projected;
  const float* a_log;
  const float* dt_bias;
  float dt_min, dt_max;
  float* z;
  float* mixed;
  float* log_decay;
  float* dt;
  int32_t rows, values, conv_dim, heads;
};

// As KdaGatesParams in kernels/layer_ops.h.
struct KdaGatesKernelParams {
  const float* a_log;
  const float* dt_bias;
  float* log_decay;
  float* beta;
  int32_t rows, heads, key_dim;
};

// As NormGate in kernels/layer_ops.h.
enum class GateFunction : int32_t { silu, sigmoid, silu_before };

// Heads wider than this have a block each.
constexpr int32_t kMaxWarpHead = 512;

// out[r, h, :] = norm(x[r, h, :]) with the gate. One warp a head, or one block.
struct GatedNormParams {
  const float* x;
  const float* gate;
  void* out;  // activations
  int64_t x_row_stride, x_head_stride, gate_row_stride, gate_head_stride;
  int64_t out_row_stride, out_head_stride;
  NormWeights norm;
  int64_t weight_head_stride;  // from the weights of a head to those of the next; 0: they share
  GateFunction gate_function;
  int32_t rows, heads, dim;
};

// The norm of x, or of x * silu(gate), whose rows are divided among GPUs. One block a row.
struct DividedNormKernelParams {
  const void* x;      // f32 or activations [rows, dim]
  const float* gate;  // null: none
  void* out;          // activations; may be x. Null: the kernel writes `squares`
  float* squares;     // [rows]; of all values of a row where `out` is computed
  int64_t x_stride, gate_stride, out_stride;  // between rows
  int32_t x_is_f32;
  NormWeights norm;
  int32_t rows, dim;
  int32_t row_dim;  // values of a row on all GPUs
};

// out[r] = factor * table[index[r]]: f32 from activations (an embedding) or from f32 (rows that
// are kept). Indices outside [0, table_rows) count as 0.
struct GatherParams {
  const void* table;
  int64_t table_stride;
  int32_t table_is_f32;
  const int32_t* index;
  float* out;
  int64_t out_stride;
  float factor;
  int64_t table_rows;
  int32_t rows, dim;
};

// out[index[r]] = x[r], unless the index is negative.
struct StoreRowsParams {
  const void* x;  // f32 or bf16 [rows, dim] at intervals of x_stride
  int64_t x_stride;
  int32_t x_is_f32;
  const int64_t* index;  // [rows]; null: row r of `out` is row r
  float* out;
  int64_t out_stride;
  int32_t rows, dim;
};

// out[r, c] = x[r, index[c]], -inf where the index is negative.
struct SpreadColumnsParams {
  const float* x;
  int64_t x_stride;
  const int32_t* index;  // [dim]
  float* out;            // [rows, dim] at intervals of out_stride
  int64_t out_stride;
  int32_t rows, dim;
};

// table[rows[t]][places[t]] = slots[t]: enters a pass's tokens in the request table. Negative
// slots are padding. token_ids[t] = drawn[drawn_by[t]], where drawn_by is not negative: takes the
// tokens that the pass before drew.
struct RecordSlotsParams {
  const int32_t* rows;    // [tokens]
  const int32_t* places;  // [tokens]
  const int64_t* slots;   // [tokens]
  int32_t* table;         // [.., stride]
  int64_t stride;
  const int32_t* drawn_by;  // [tokens]
  const int32_t* drawn;
  int32_t* token_ids;  // [tokens]
  int32_t tokens;
};

// out[r, i] = x[r, i] * silu(gate[r, i]), with `plain` x[r, i] * gate[r, i]; x[r, i] without a
// gate.
struct SiluGateKernelParams {
  const float* x;
  const float* gate;  // or null
  void* out;          // activations, or f32
  int64_t x_stride, gate_stride, out_stride;
  int32_t rows, dim;
  int32_t plain, out_is_f32;
};

// x becomes ln(1 + e^x).
struct SoftplusParams {
  float* x;
  int64_t count;
};

struct SoftCapParams {
  float* x;
  int64_t count;
  float cap;
};

// As MoeScore in kernels/layer_ops.h.
enum RoutingScore : int32_t {
  kScoreSoftmax,
  kScoreTopkSoftmax,
  kScoreSigmoid,
  kScoreGroupedSigmoid,
  kScoreGroupedSoftmax
};
constexpr int32_t kMaxRoutedExperts = 1024;

// One warp a row.
struct RoutingParams {
  const float* logits;  // [rows, experts]
  const float* bias;    // [experts] or null
  int32_t* ids;         // [rows, top_k]
  float* weights;       // [rows, top_k]
  int32_t rows, experts, top_k;
  int32_t score, normalise;
  float sum_epsilon, factor;
  int32_t groups, top_groups;
  int32_t first_own, own;  // experts of the rank: ids are places among them, -1 for others
};

// Lists the choices of every expert: list[e * rows ...] gets the choices (row * top_k + k) that
// chose e, in ascending order, and counts[e] their number. One warp an expert.
struct GroupParams {
  const int32_t* ids;  // [rows, top_k]; -1: no expert here
  int32_t* counts;     // [experts]
  int32_t* list;       // [experts, rows]
  int32_t rows, experts, top_k;
};

// out[r] is, or grows by, the weighted results of row r's experts, in ascending order of experts.
struct CombineParams {
  const int32_t* ids;    // [rows, top_k]; -1: no result
  const float* weights;  // [rows, top_k] or null: 1
  const float* results;  // [rows * top_k, dim]
  float* out;            // [rows, dim]
  int32_t rows, top_k, dim;
  int32_t adds;  // to what `out` holds
};

// Weights of one expert: its matrices, all of one shape, bf16.
struct ExpertMatrix {
  const void* weight;  // [n, k], or [k, n]
  const float* bias;   // [n] or null
};

// For every choice c of an expert: out[c] = scale[c] * (x[source(c)] W^T) + bias, where source is
// the choice or its row. The results of the `matrices` matrices are adjacent in `out`, and a column
// tile lies in one of them. Grid: x counts experts * tiles of choices, y tiles of columns.
struct ExpertGemmParams {
  const void* x;  // activations [.., k]
  int64_t x_stride;
  const ExpertMatrix* weights;  // [experts, matrices]
  int64_t weight_stride;
  const int32_t* counts;  // [experts]
  const int32_t* list;    // [experts, rows]
  const float* scale;     // [rows * top_k] or null
  void* out;              // activations, or f32, [rows * top_k, matrices * n]
  int64_t out_stride;
  int32_t rows, top_k;
  int32_t source_is_row;  // else the choice
  int32_t matrices;
  int32_t n, k;
  int32_t row_tiles;  // for each expert
  int32_t out_is_f32;
};

}  // namespace fovea::kernels::cuda
