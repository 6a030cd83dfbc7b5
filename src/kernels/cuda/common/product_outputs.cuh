// SPDX-License-Identifier: Apache-2.0
// Stores the outputs of a product of few rows: bias, gates, the residual stream, the norms on both
// sides, and messages to other ranks.
#pragma once

#include "kernels/cuda/common/activation.cuh"
#include "kernels/cuda/common/mail.cuh"
#include "kernels/cuda/common/skinny_gemm_params.h"

namespace fovea::kernels::cuda {

// A row of the weight, by its place in the tiles. With gates, 16 rows of a tile are 8 gates and the
// 8 ups of the same outputs.
struct WeightRow {
  const uint16_t* at;
  bool live;

  __device__ WeightRow(const SkinnyGemmParams& params, int first_row, int index) {
    const bool gated = params.up_offset > 0;
    const int output = gated ? first_row / 2 + index / 16 * 8 + index % 8 : first_row + index;
    live = output < params.n;
    const int64_t row = (live ? output : 0) + (gated && index % 16 >= 8 ? params.up_offset : 0);
    at = static_cast<const uint16_t*>(params.weight) + row * params.weight_stride;
  }
};

struct ProductOutputs {
  const SkinnyGemmParams& params;
  float* factors;  // [rows], shared: those of the norm before the product, or 1

  // Sums the squares of each row in the same order in every block. Warps take rows in turn.
  __device__ void find_factors(int warp, int warps) const {
    const int lane = threadIdx.x % 32;
    const int count = squares_of(params.k);
    for (int row = warp; row < params.rows; row += warps) {
      float sum = 0;
      if (params.in_squares) {
        const float* const squares = params.in_squares + static_cast<int64_t>(row) * count;
        for (int i = lane; i < count; i += 32) sum += __ldcg(squares + i);
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      }
      if (lane == 0) {
        factors[row] = params.in_squares ? rsqrtf(sum / params.k + params.in_epsilon) : 1.0f;
      }
    }
  }

  // Returns the first output of the rows of the weight from `row` on; with gates, two rows have
  // one output.
  __device__ int output_of(int row) const { return params.up_offset > 0 ? row / 2 : row; }

  // Returns the sum with its bias; `index` is the row of the weight.
  __device__ float with_bias(float sum, int index) const {
    if (!params.bias) return sum;
    if (params.out_is_f32 || params.stream) {
      return sum + static_cast<const float*>(params.bias)[index];
    }
    return sum + from_bf16(static_cast<const uint16_t*>(params.bias)[index]);
  }

  __device__ void store(int row, int at, float value) const {
    const int64_t to = row * params.out_stride + at;
    if (params.out_is_f32) {
      static_cast<float*>(params.out)[to] = value;
    } else {
      static_cast<uint16_t*>(params.out)[to] = to_bf16(value);
    }
  }

  // Stores an output that may be sent, too. turn: Mail::turn_of() the boxes.
  __device__ void store_part(int row, int at, float value, uint32_t turn) const {
    store(row, at, value);
    if (params.boxes.sends) Mail::send(params.boxes, turn, row * params.n + at, value);
  }

  // Terms and factors of the thread's output, and the turn of the message. The loads begin before
  // the products, because their trip to the L2 cache would delay the next kernel.
  struct Early {
    float stream = 0;
    float weight = 0;
    uint32_t turn = 0;
  };
  __device__ Early load_early(int first_row, int columns) const {
    if (params.boxes.sends) return {0, 0, Mail::turn_of(params.boxes)};
    const int row = threadIdx.x / columns;
    const int at = output_of(first_row) + threadIdx.x % columns;
    if (!params.stream || row >= params.rows || at >= params.n) return {};
    return {__ldcg(params.stream + static_cast<int64_t>(row) * params.n + at),
            params.norm.weight[at], 0};
  }

  // Adds to the stream, one output a thread, and sums squares over 16 columns, which are 16 lanes.
  template <class Sum>
  __device__ void add_to_stream(int first, int columns, const Sum& sum_at,
                                const Early& early) const {
    const int index = threadIdx.x % columns;
    const int row = threadIdx.x / columns;
    const int at = first + index;
    const bool is_live = row < params.rows && at < params.n;
    float value = 0;
    if (is_live) {
      const float sum = sum_at(row, index) * factors[row];
      value = early.stream + params.stream_factor * with_bias(sum, at);
      params.stream[static_cast<int64_t>(row) * params.n + at] = value;
      store(row, at, value * (params.norm.plus + early.weight));
    }
    float squares = value * value;
    for (int step = kSquaredColumns / 2; step > 0; step /= 2) {
      squares += __shfl_xor_sync(~0u, squares, step);
    }
    if (is_live && threadIdx.x % kSquaredColumns == 0) {
      params.squares[static_cast<int64_t>(row) * squares_of(params.n) + at / kSquaredColumns] =
          squares;
    }
  }

  template <class Sum>
  __device__ void store_gated(int first, int columns, int threads, const Sum& sum_at) const {
    for (int i = threadIdx.x; i < columns * params.rows; i += threads) {
      const int index = i % columns;
      const int row = i / columns;
      const int at = first + index;
      if (at >= params.n) continue;
      const int gate_row = index / 8 * 16 + index % 8;
      const float factor = factors[row];
      const float gate = with_bias(sum_at(row, gate_row) * factor, at);
      const float up = with_bias(sum_at(row, gate_row + 8) * factor, params.up_offset + at);
      store(row, at,
            gated_value(params.activation, params.alpha, params.limit, from_bf16(to_bf16(gate)),
                        from_bf16(to_bf16(up))));
    }
  }

  // Stores what `weight_rows` rows of a block's tile yield, a multiple of 16 from weight row
  // `first_row` of all tiles on. sum_at(row, i) returns the product of `row` and the i-th of them.
  // `early` is load_early() of the same.
  template <class Sum>
  __device__ void store_all(int first_row, int weight_rows, int threads, const Sum& sum_at,
                            const Early& early) const {
    const int first = output_of(first_row);
    if (params.stream) return add_to_stream(first, weight_rows, sum_at, early);
    if (params.up_offset > 0) return store_gated(first, weight_rows / 2, threads, sum_at);
    for (int i = threadIdx.x; i < weight_rows * params.rows; i += threads) {
      const int index = i % weight_rows;
      const int row = i / weight_rows;
      const int at = first + index;
      if (at >= params.n) continue;
      store_part(row, at, with_bias(sum_at(row, index) * factors[row], at), early.turn);
    }
  }
};

}  // namespace fovea::kernels::cuda
