// SPDX-License-Identifier: Apache-2.0
// Adds the sums of the two blocks that share a tile, and stores the outputs: bias, gates, the
// residual stream, and the norms on both sides.
#pragma once

#include "kernels/cuda/sm90/narrow_gemm/config.cuh"

namespace fovea::kernels::cuda {

__device__ __forceinline__ float4 sum_of(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ __forceinline__ float4 scaled(const float4& a, float factor) {
  return {a.x * factor, a.y * factor, a.z * factor, a.w * factor};
}

template <int kRows, int kGroups>
struct Epilogue {
  using Shape = NarrowTiles<kRows, kGroups>;
  const NarrowGemmParams& params;
  typename Shape::SharedMemory& shared;
  const Part& part;
  // Items of a thread: four adjacent places of the stream. They are loaded before the blocks
  // exchange sums, because a trip to the L2 cache would delay the next kernel.
  static constexpr int kItems = kRows * (Shape::kColumns / 4) / Shape::kConsumers;
  float4 stream[kItems] = {}, norm[kItems] = {};
  uint32_t turn = 0;

  // Each block of a cluster stores half of the rows.
  __device__ __forceinline__ int rows_of_block() const { return kRows / params.splits; }
  __device__ __forceinline__ int first_row() const { return part.rank * rows_of_block(); }
  __device__ __forceinline__ int end_row() const {
    return min(params.product.rows, first_row() + rows_of_block());
  }
  __device__ __forceinline__ ProductOutputs outputs() const {
    return {params.product, shared.factors};
  }

  // Finds the factors of the block's rows, eight lanes a row.
  __device__ __forceinline__ void find_factors() const {
    const SkinnyGemmParams& product = params.product;
    constexpr int kLanes = 8;
    const int lane = threadIdx.x % kLanes;
    const int count = squares_of(product.k) / 4;
#pragma unroll 1
    for (int row = first_row() + threadIdx.x / kLanes; row < first_row() + rows_of_block();
         row += Shape::kConsumers / kLanes) {
      float sum = 0;
      if (product.in_squares && row < product.rows) {
        const auto* const squares =
            reinterpret_cast<const float4*>(product.in_squares) + row * count;
#pragma unroll 4
        for (int i = lane; i < count; i += kLanes) {
          const float4 four = __ldcg(squares + i);
          sum += (four.x + four.y) + (four.z + four.w);
        }
      }
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane == 0) {
        shared.factors[row] =
            product.in_squares ? rsqrtf(sum / product.k + product.in_epsilon) : 1.0f;
      }
    }
  }

  // Calls use(row, i) for every row that the block stores and every i below kCount.
  template <int kCount, class Use>
  __device__ __forceinline__ void for_all(const Use& use) const {
    const int items = rows_of_block() * kCount;
#pragma unroll 1
    for (int number = threadIdx.x; number < items; number += Shape::kConsumers) {
      use(first_row() + number / kCount, number % kCount);
    }
  }
  // Does the same for columns of four outputs, with the number of the thread's item, which is known
  // to the compiler; whole warps call `use` together.
  template <class Use>
  __device__ __forceinline__ void for_items(const Use& use) const {
    constexpr int kCount = Shape::kColumns / 4;
    static_assert(kRows / kMaxSplits * kCount % 32 == 0);
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int number = item * Shape::kConsumers + threadIdx.x;
      if (number >= rows_of_block() * kCount) break;
      use(item, first_row() + number / kCount, number % kCount);
    }
  }

  __device__ __forceinline__ void load_early() {
    if (params.product.boxes.sends) turn = Mail::turn_of(params.product.boxes);
    if (!params.product.stream) return;
    for_items([&](int item, int row, int i) {
      const int at = part.tile * Shape::kColumns + i * 4;
      if (row >= end_row() || at >= params.product.n) return;
      stream[item] = __ldcg(reinterpret_cast<const float4*>(stream_at(row, at)));
      norm[item] = *reinterpret_cast<const float4*>(params.product.norm.weight + at);
    });
  }
  __device__ __forceinline__ float* stream_at(int row, int at) const {
    return params.product.stream + static_cast<int64_t>(row) * params.product.n + at;
  }

  // Sends the sums of the other block's rows and adds what it has for the own ones. The first half
  // of sums[] is that of the first rows; the block's own half moves there.
  __device__ __forceinline__ void exchange(float (&sums)[kRows / 2]) const {
    const bool second = part.rank > 0;
#pragma unroll
    for (int i = 0; i < Shape::kReceived; ++i) {
      float4 given;
      float* const of_given[4] = {&given.x, &given.y, &given.z, &given.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = sums[4 * i + j], high = sums[kRows / 4 + 4 * i + j];
        *of_given[j] = second ? low : high;
        sums[4 * i + j] = second ? high : low;
      }
      store_in_cluster(&shared.received[i][threadIdx.x].x, part.rank ^ 1, given,
                       shared.has_received);
    }
    shared.has_received.wait(0);
#pragma unroll
    for (int i = 0; i < Shape::kReceived; ++i) {
      const float4 other = shared.received[i][threadIdx.x];
      sums[4 * i] += other.x;
      sums[4 * i + 1] += other.y;
      sums[4 * i + 2] += other.z;
      sums[4 * i + 3] += other.w;
    }
  }

  __device__ __forceinline__ void store_sums(int group, const float (&sums)[kRows / 2]) const {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    float* to =
        &shared.sums[first_row() + lane % 4 * 2][group * kGroupColumns + warp * 16 + lane / 4];
#pragma unroll
    for (int i = 0; i < kRows / 2; i += 4, to += 8 * Shape::kPitch) {
      if (i == kRows / 4 && params.splits > 1) break;
      to[0] = sums[i];
      to[Shape::kPitch] = sums[i + 1];
      to[8] = sums[i + 2];
      to[Shape::kPitch + 8] = sums[i + 3];
    }
  }

  // Returns the product of a column of the tile, with the factor of the norm before it.
  __device__ __forceinline__ float product(int row, int column) const {
    return shared.sums[row][column] * shared.factors[row];
  }

  __device__ __forceinline__ void store_plain() const {
    for_all<Shape::kColumns>([&](int row, int i) {
      const int at = part.tile * Shape::kColumns + i;
      if (row >= end_row() || at >= params.product.n) return;
      outputs().store_part(row, at, outputs().with_bias(product(row, i), at), turn);
    });
  }
  __device__ __forceinline__ void store_gated() const {
    for_all<Shape::kColumns / 2>([&](int row, int i) {
      const SkinnyGemmParams& to = params.product;
      const int at = part.tile * (Shape::kColumns / 2) + i;
      if (row >= end_row() || at >= to.n) return;
      const int column = i / 8 * 16 + i % 8;
      const float gate = outputs().with_bias(product(row, column), at);
      const float up = outputs().with_bias(product(row, column + 8), to.up_offset + at);
      outputs().store(row, at,
                      gated_value(to.activation, to.alpha, to.limit, from_bf16(to_bf16(gate)),
                                  from_bf16(to_bf16(up))));
    });
  }

  // Adds to the stream, and sums squares over 16 columns, which are 4 lanes.
  __device__ __forceinline__ void add_to_stream() const {
    const SkinnyGemmParams& product = params.product;
    for_items([&](int item, int row, int i) {
      const int at = part.tile * Shape::kColumns + i * 4;
      const bool live = row < end_row() && at < product.n;
      float4 value = {};
      if (live) {
        const float4 weight = norm[item];
        const float plus = product.norm.plus;
        float4 sum =
            scaled(*reinterpret_cast<const float4*>(&shared.sums[row][i * 4]), shared.factors[row]);
        if (product.bias) {
          sum = sum_of(
              sum, *reinterpret_cast<const float4*>(static_cast<const float*>(product.bias) + at));
        }
        value = sum_of(stream[item], scaled(sum, product.stream_factor));
        *reinterpret_cast<float4*>(stream_at(row, at)) = value;
        four_to_bf16(static_cast<uint16_t*>(product.out) + row * product.out_stride + at,
                     {value.x * (plus + weight.x), value.y * (plus + weight.y),
                      value.z * (plus + weight.z), value.w * (plus + weight.w)});
      }
      float squares = value.x * value.x + value.y * value.y + value.z * value.z + value.w * value.w;
      for (int step = kSquaredColumns / 8; step > 0; step /= 2) {
        squares += __shfl_xor_sync(~0u, squares, step);
      }
      if (live && at % kSquaredColumns == 0) {
        product.squares[static_cast<int64_t>(row) * squares_of(product.n) + at / kSquaredColumns] =
            squares;
      }
    });
  }

  __device__ __forceinline__ void store_all() const {
    if (params.product.stream) return add_to_stream();
    if (params.product.up_offset > 0) return store_gated();
    store_plain();
  }
};

}  // namespace fovea::kernels::cuda
