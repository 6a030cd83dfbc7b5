// SPDX-License-Identifier: Apache-2.0
// Adds the sums of the blocks that share a tile, and stores the outputs: bias, gates, the
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
  // Items of a thread: four adjacent places of the stream in every eighth row. Blocks that share a
  // tile load them while they exchange sums, because a trip to the L2 cache would delay the next
  // kernel. A block that has a tile alone has no registers for that.
  static constexpr int kEarlyItems = Shape::kMaxOwnUnits;
  static constexpr int kItemLanes = Shape::kColumns / 4;
  static_assert(Shape::kConsumers == kUnit * kItemLanes);
  float4 stream[kEarlyItems] = {}, norm = {};
  uint32_t turn = 0;

  // Blocks of a cluster share the rows of outputs.
  __device__ __forceinline__ int first_unit(int rank) const {
    return Shape::kUnits * rank / part.splits;
  }
  __device__ __forceinline__ int units() const {
    return first_unit(part.rank + 1) - first_unit(part.rank);
  }
  __device__ __forceinline__ int first_row() const { return first_unit(part.rank) * kUnit; }
  __device__ __forceinline__ int end_row() const {
    return min(params.product.rows, first_unit(part.rank + 1) * kUnit);
  }
  __device__ __forceinline__ ProductOutputs outputs() const {
    return {params.product, shared.factors};
  }

  // Finds the factors of the block's rows, eight lanes a row. Loads of all rows begin together.
  __device__ __forceinline__ void find_factors() const {
    const SkinnyGemmParams& product = params.product;
    constexpr int kLanes = 8;
    constexpr int kTogether = Shape::kConsumers / kLanes;
    constexpr int kPasses = (kRows + kTogether - 1) / kTogether;
    const int lane = threadIdx.x % kLanes;
    const int first = first_row() + threadIdx.x / kLanes;
    const int count = squares_of(product.k) / 4;
    float sums[kPasses] = {};
    if (product.in_squares) {
#pragma unroll 4
      for (int i = lane; i < count; i += kLanes) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          const int row = first + pass * kTogether;
          if (row >= end_row()) continue;
          const float4 four =
              __ldcg(reinterpret_cast<const float4*>(product.in_squares) + row * count + i);
          sums[pass] += (four.x + four.y) + (four.z + four.w);
        }
      }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      float sum = sums[pass];
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      const int row = first + pass * kTogether;
      if (lane != 0 || row >= end_row()) continue;
      shared.factors[row] =
          product.in_squares ? rsqrtf(sum / product.k + product.in_epsilon) : 1.0f;
    }
  }

  // Calls use(item, row) for the thread's items up to kCount; whole warps call it together.
  template <int kCount, class Use>
  __device__ __forceinline__ void for_items(const Use& use) const {
#pragma unroll
    for (int item = 0; item < kCount; ++item) {
      if (item >= units()) break;
      use(item, first_row() + item * kUnit + static_cast<int>(threadIdx.x) / kItemLanes);
    }
  }
  // Returns the first column of the thread's items in the tile.
  __device__ __forceinline__ int item_column() const { return threadIdx.x % kItemLanes * 4; }

  __device__ __forceinline__ void load_early() {
    if (params.product.boxes.sends) turn = Mail::turn_of(params.product.boxes);
    const int at = part.tile * Shape::kColumns + item_column();
    if (!params.product.stream || at >= params.product.n) return;
    norm = *reinterpret_cast<const float4*>(params.product.norm.weight + at);
    if (part.splits == 1) return;
    for_items<kEarlyItems>([&](int item, int row) {
      if (row < end_row()) stream[item] = load_stream(row, at);
    });
  }
  __device__ __forceinline__ float4 load_stream(int row, int at) const {
    return __ldcg(reinterpret_cast<const float4*>(stream_at(row, at)));
  }
  __device__ __forceinline__ float* stream_at(int row, int at) const {
    return params.product.stream + static_cast<int64_t>(row) * params.product.n + at;
  }

  // Sends the sums of the rows that other blocks store.
  __device__ __forceinline__ void send(const float (&sums)[kRows / 2]) const {
    if (threadIdx.x == 0) {
      shared.has_received.arrive_expecting((part.splits - 1) * units() *
                                           sizeof(shared.received[0]));
    }
    cluster_wait();  // the others have room for them
#pragma unroll 1
    for (int step = 1; step < part.splits; ++step) {
      const int rank = (part.rank + step) % part.splits;
      const int first = first_unit(rank), end = first_unit(rank + 1);
      const int sender = part.rank - (part.rank > rank);
      float4(*const to)[Shape::kConsumers] = shared.received + sender * (end - first) - first;
#pragma unroll
      for (int unit = 0; unit < Shape::kUnits; ++unit) {
        if (unit < first || unit >= end) continue;
        const float* const sum = sums + 4 * unit;
        store_in_cluster(&to[unit][threadIdx.x].x, rank, float4{sum[0], sum[1], sum[2], sum[3]},
                         shared.has_received);
      }
    }
  }
  // Returns the block's own sum i of `sums`, where the compiler knows all possible places of it.
  __device__ __forceinline__ float own_sum(const float (&sums)[kRows / 2], int i) const {
    const int first = first_unit(part.rank);
    float sum = sums[i];
    for (const int other : {Shape::kUnits / 3, Shape::kUnits / 2, Shape::kUnits * 2 / 3}) {
      if (4 * other + i < kRows / 2 && first == other) sum = sums[4 * other + i];
    }
    return sum;
  }
  // Adds to the block's own sums those of the other blocks, in the order of k.
  __device__ __forceinline__ void receive(float (&own)[4 * Shape::kMaxOwnUnits]) const {
    shared.has_received.wait(0);
    const bool has_second = part.splits > 2;
    const bool is_last = part.rank == 2;
#pragma unroll
    for (int unit = 0; unit < Shape::kMaxOwnUnits; ++unit) {
      if (unit >= units()) break;
      float* const sums = own + 4 * unit;
      const float4 own_sum = {sums[0], sums[1], sums[2], sums[3]};
      const float4 first = shared.received[unit][threadIdx.x];
      const float4 second = has_second ? shared.received[units() + unit][threadIdx.x] : float4{};
      float4 sum = sum_of(first, is_last ? second : own_sum);
      if (has_second) sum = sum_of(sum, is_last ? own_sum : second);
      sums[0] = sum.x;
      sums[1] = sum.y;
      sums[2] = sum.z;
      sums[3] = sum.w;
    }
  }

  // Stores the sums of the block's rows to shared memory.
  template <int kCount>
  __device__ __forceinline__ void store_sums(int group, const float (&sums)[kCount]) const {
    named_barrier_wait(consumers, Shape::kConsumers);  // all have read the memory
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    float* to =
        &shared.sums[first_row() + lane % 4 * 2][group * kGroupColumns + warp * 16 + lane / 4];
#pragma unroll
    for (int i = 0; i < kCount; i += 4, to += kUnit * Shape::kPitch) {
      if (i == 4 * units()) break;
      to[0] = sums[i];
      to[Shape::kPitch] = sums[i + 1];
      to[8] = sums[i + 2];
      to[Shape::kPitch + 8] = sums[i + 3];
    }
    named_barrier_wait(consumers, Shape::kConsumers);
  }
  // Takes the sums of the block's part of k, and leaves those of its rows in shared memory.
  __device__ __forceinline__ void gather_sums(int group, const float (&sums)[kRows / 2]) {
    if (part.splits == 1) {
      load_early();
      return store_sums(group, sums);
    }
    send(sums);
    float own[4 * Shape::kMaxOwnUnits];
#pragma unroll
    for (int i = 0; i < 4 * Shape::kMaxOwnUnits; ++i) own[i] = own_sum(sums, i);
    load_early();
    receive(own);
    store_sums(group, own);
  }

  // Returns the products of four columns of the tile, with the factor of the norm before them.
  __device__ __forceinline__ float4 products(int row, int column) const {
    return scaled(*reinterpret_cast<const float4*>(&shared.sums[row][column]), shared.factors[row]);
  }
  // Returns the biases of four rows of the weight.
  __device__ __forceinline__ float4 biases(int index) const {
    const SkinnyGemmParams& product = params.product;
    if (!product.bias) return {};
    if (product.out_is_f32 || product.stream) {
      return *reinterpret_cast<const float4*>(static_cast<const float*>(product.bias) + index);
    }
    const auto* const bias = static_cast<const uint16_t*>(product.bias) + index;
    return {from_bf16(bias[0]), from_bf16(bias[1]), from_bf16(bias[2]), from_bf16(bias[3])};
  }
  __device__ __forceinline__ void store_four(int row, int at, const float4& values) const {
    const int64_t to = row * params.product.out_stride + at;
    if (params.product.out_is_f32) {
      *reinterpret_cast<float4*>(static_cast<float*>(params.product.out) + to) = values;
    } else {
      four_to_bf16(static_cast<uint16_t*>(params.product.out) + to, values);
    }
  }

  __device__ __forceinline__ void store_plain() const {
    const int at = part.tile * Shape::kColumns + item_column();
    if (at >= params.product.n) return;
    const float4 bias = biases(at);
    for_items<Shape::kUnits>([&](int, int row) {
      if (row < end_row()) store_four(row, at, sum_of(products(row, item_column()), bias));
    });
  }
  // Words of a message are adjacent in adjacent threads.
  __device__ __forceinline__ void store_sent() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < units() * kUnit * Shape::kColumns; i += Shape::kConsumers) {
      const int row = first_row() + i / Shape::kColumns;
      const int column = i % Shape::kColumns;
      const int at = part.tile * Shape::kColumns + column;
      if (row >= end_row() || at >= params.product.n) continue;
      const float sum = shared.sums[row][column] * shared.factors[row];
      outputs().store_part(row, at, outputs().with_bias(sum, at), turn);
    }
  }
  // A thread has four outputs of every 16th row.
  __device__ __forceinline__ void store_gated() const {
    const SkinnyGemmParams& product = params.product;
    constexpr int kLanes = Shape::kColumns / 8;
    const int index = threadIdx.x % kLanes * 4;
    const int column = index / 8 * 16 + index % 8;
    const int at = part.tile * (Shape::kColumns / 2) + index;
    if (at >= product.n) return;
    const float4 gate_bias = biases(at), up_bias = biases(product.up_offset + at);
    const auto value = [&](float gate, float up) {
      return gated_value(product.activation, product.alpha, product.limit, from_bf16(to_bf16(gate)),
                         from_bf16(to_bf16(up)));
    };
#pragma unroll 2
    for (int row = first_row() + static_cast<int>(threadIdx.x) / kLanes; row < end_row();
         row += Shape::kConsumers / kLanes) {
      const float4 gate = sum_of(products(row, column), gate_bias);
      const float4 up = sum_of(products(row, column + 8), up_bias);
      store_four(
          row, at,
          {value(gate.x, up.x), value(gate.y, up.y), value(gate.z, up.z), value(gate.w, up.w)});
    }
  }

  // Adds to the stream, and sums squares over 16 columns, which are 4 lanes.
  __device__ __forceinline__ void add_to_stream() const {
    const SkinnyGemmParams& product = params.product;
    const int at = part.tile * Shape::kColumns + item_column();
    const float4 bias = at < product.n ? biases(at) : float4{};
    for_items<Shape::kUnits>([&](int item, int row) {
      const bool live = row < end_row() && at < product.n;
      float4 value = {};
      if (live) {
        const float plus = product.norm.plus;
        const float4 sum = sum_of(products(row, item_column()), bias);
        const float4 before =
            part.splits > 1 && item < kEarlyItems ? stream[item] : load_stream(row, at);
        value = sum_of(before, scaled(sum, product.stream_factor));
        *reinterpret_cast<float4*>(stream_at(row, at)) = value;
        four_to_bf16(static_cast<uint16_t*>(product.out) + row * product.out_stride + at,
                     {value.x * (plus + norm.x), value.y * (plus + norm.y),
                      value.z * (plus + norm.z), value.w * (plus + norm.w)});
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
    if (params.product.boxes.sends) return store_sent();
    store_plain();
  }
};

}  // namespace fovea::kernels::cuda
