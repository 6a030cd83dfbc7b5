// SPDX-License-Identifier: Apache-2.0
// Parameter block of products of a few rows with a matrix, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/layer_params.h"
#include "kernels/cuda/common/rank_boxes.h"

namespace fovea::kernels::cuda {

// out [rows, n] = x [rows, k] weight^T + bias, summed in f32. With up_offset > 0, weight rows j and
// up_offset + j are the gate and the up of output j: out = activation(gate) * up, where both are
// rounded to bf16 first.
//
// A norm can stand on both sides of a product. Its factor is known only when a row is complete, so
// the product before the norm writes rows without the factor, and the sums of squares that it
// follows from; the product after the norm multiplies its sums by the factor.
struct SkinnyGemmParams {
  const void* x;       // bf16, rows aligned to 16 bytes
  const void* weight;  // bf16 [n or up_offset + n, k], rows aligned to 16 bytes
  const void* bias;    // one for each row of the weight, of the type of `out`, or f32 with stream
  void* out;           // bf16 or f32
  int64_t x_stride, weight_stride, out_stride;  // in elements
  int32_t rows, n, k;                           // k: a multiple of kSkinnyDepth
  int32_t out_is_f32;
  int32_t up_offset;
  int32_t activation;  // a GatedActivation
  float alpha, limit;
  // With in_squares, x are rows of k values times the weights of a norm, without its factor.
  const float* in_squares;  // [rows, squares_of(k)] or null
  float in_epsilon;
  // With stream, the product is added: stream += stream_factor * (product + bias), and out =
  // stream * norm, as bf16 without the norm's factor. There is no up_offset then.
  float* stream;  // [rows, n], dense, or null
  float stream_factor;
  NormWeights norm;
  float* squares;  // [rows, squares_of(n)]: sums of stream^2 over 16 columns each
  // With boxes.sends, `out` is f32 and dense, and is a message of rows * n words to each other rank
  // as well. There is neither up_offset nor stream. A sum of rank_sum takes the message.
  RankBoxes boxes;
};

constexpr int kSkinnyDepth = 64;
constexpr int kSquaredColumns = 16;

// Returns the number of sums of squares of a row.
constexpr int32_t squares_of(int32_t columns) {
  return (columns + kSquaredColumns - 1) / kSquaredColumns;
}

}  // namespace fovea::kernels::cuda
