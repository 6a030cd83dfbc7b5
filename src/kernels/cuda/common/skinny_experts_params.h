// SPDX-License-Identifier: Apache-2.0
// Parameter block of the products of a few rows with the experts that they chose, read by host and
// device code alike.
#pragma once

#include "kernels/cuda/common/layer_params.h"

namespace fovea::kernels::cuda {

// The two products of a layer of experts.
//
// gated: out[c] = activation(gate) * up for every choice c of row r, where gate and up are
// scale[c] * (x[r] weight^T) + bias, rounded to bf16.
// combined: out[r] is, or grows by, the sum over the choices c of row r, in ascending order of
// their experts, of scale[c] * (x[c] weight^T + bias).
struct SkinnyExpertsParams {
  const void* x;                // bf16 [rows, k] or [rows * top_k, k]
  const ExpertMatrix* weights;  // [experts, matrices]
  const int32_t* ids;           // [rows, top_k]; no row has an expert twice; -1: none
  const float* scale;           // [rows, top_k] or null: 1
  void* out;                    // bf16 [rows * top_k, n] or f32 [rows, n]
  int64_t x_stride, out_stride;
  int32_t weight_stride;
  int32_t rows, top_k, experts, matrices;
  int32_t n, k;
  int32_t splits;  // blocks of a cluster, which share k
  // gated: the gate of output j is column j * column_step of the first matrix, and the up is the
  // column `up_column` behind that of the last one.
  int32_t column_step, up_column;
  int32_t activation;  // a GatedActivation
  float alpha, limit;
  int32_t adds;  // combined: to what `out` holds
};

constexpr int kMaxSkinnyRows = 8;
constexpr int kMaxSkinnyChoices = 128;  // all rows'
constexpr int kMaxSkinnyExperts = 512;
constexpr int kMaxSkinnySplits = 4;

}  // namespace fovea::kernels::cuda
