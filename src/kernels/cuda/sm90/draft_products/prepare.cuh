// SPDX-License-Identifier: Apache-2.0
// A block's work on its tokens before it multiplies the state: products of their vectors, factors
// and operands. A warp takes a place, a lane four columns.
#pragma once

#include "kernels/cuda/sm90/draft_products/load.cuh"

namespace fovea::kernels::cuda {

template <class Shape>
struct PrepareTokens : LoadTokens<Shape> {
  using Params = RecurrenceParams;
  using Memory = ProductsMemory<Shape>;
  using LoadTokens<Shape>::whole_warp;
  using LoadTokens<Shape>::lane;
  using LoadTokens<Shape>::warp;
  using LoadTokens<Shape>::eighth;
  using LoadTokens<Shape>::fourth;

  __device__ static float4 load_four(const float* row) {
    return *reinterpret_cast<const float4*>(row + lane() * 4);
  }
  __device__ static void store_four(float* row, float4 four) {
    *reinterpret_cast<float4*>(row + lane() * 4) = four;
  }
  __device__ static float4 product(float4 a, float4 b) {
    return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
  }
  __device__ static float dot(float4 a, float4 b) {
    return fmaf(a.x, b.x, a.y * b.y) + fmaf(a.z, b.z, a.w * b.w);
  }
  // Sums each value over the warp: lane l returns the sum of value l % kCount.
  template <int kCount>
  __device__ static float own_sum(float (&values)[kCount]) {
    int count = kCount;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      if (step < kCount) {
        count = kCount / step / 2;
#pragma unroll
        for (int i = 0; i < count; ++i) {
          const float kept = lane() & step ? values[2 * i + 1] : values[2 * i];
          const float given = lane() & step ? values[2 * i] : values[2 * i + 1];
          values[i] = kept + __shfl_xor_sync(~0u, given, step);
        }
      } else {
        values[0] += __shfl_xor_sync(~0u, values[0], step);
      }
    }
    return values[0];
  }

  // Replaces log decays of columns by decays.
  __device__ static void exponentiate(const TokenPlaces& places, Memory& shared) {
    for (int32_t i = whole_warp(); i < places.end; i += Shape::kWarps) {
      if (!places.is_live(i)) continue;
      const float4 logs = load_four(shared.columns.of[i]);
      store_four(shared.columns.of[i], {expf(logs.x), expf(logs.y), expf(logs.z), expf(logs.w)});
    }
  }

  // Returns the product of a lane's factor and those of the lanes before it.
  __device__ static float product_up_to(float factor) {
#pragma unroll
    for (int by = 1; by < Shape::kPlaces; by *= 2) {
      const float before = __shfl_up_sync(~0u, factor, by);
      if (lane() >= by) factor *= before;
    }
    return factor;
  }
  // Returns the product of the decays of columns of live places in [begin, end).
  __device__ static float4 column_decays(const TokenPlaces& places, int32_t begin, int32_t end,
                                         const Memory& shared) {
    float4 decays = {1, 1, 1, 1};
#pragma unroll 1
    for (int32_t i = begin; i < end; ++i) {
      if (places.is_live(i)) decays = product(decays, load_four(shared.columns.of[i]));
    }
    return decays;
  }

  // Writes a vector as row `row` of its group's operands.
  __device__ static void write_operand(float4 vector, int32_t row, Tf32Rows (*steps)[32]) {
    constexpr int kPart = 8 * Shape::kPartSteps;  // columns
    const int32_t first = lane() * 4;
    const auto write = [&](int32_t column, float x, float y) {
      const int32_t step = column / kPart * Shape::kPartSteps + column / 2 % Shape::kPartSteps;
      steps[step][row * 4 + column % kPart / (2 * Shape::kPartSteps)] = rows_of(x, y);
    };
    write(first, vector.x, vector.y);
    write(first + 2, vector.z, vector.w);
  }

  // Finds the factors of a new token, and its operands.
  __device__ static void prepare_new(const Params& params, const TokenPlaces& places, int32_t place,
                                     Memory& shared) {
    const int32_t index = place - places.first_new;
    float4 in = load_four(shared.in[place]), out = load_four(shared.out[index]);
    float in_factor = 1, out_factor = params.scale;
    if (Shape::kHasDeltaRule && params.l2_normalise) {
      float squares[2] = {dot(in, in), dot(out, out)};
      const float own = own_sum(squares);
      in_factor = rsqrtf(__shfl_sync(~0u, own, 0) + 1e-6f);
      out_factor *= rsqrtf(__shfl_sync(~0u, own, 1) + 1e-6f);
    }
    if (lane() == 0) {
      shared.in_factor[place] = in_factor;
      shared.out_factor[place] = out_factor;
    }
    if constexpr (Shape::kHasDecays) {
      const float4 reach = column_decays(places, 0, place + 1, shared);
      in = product(in, reach);
      out = product(out, reach);
    }
    auto* const steps = shared.vectors[index / Shape::kGroup];
    const int32_t row = index % Shape::kGroup;
    if constexpr (Shape::kHasDeltaRule) write_operand(in, row, steps);
    write_operand(out, Shape::kGroup + row, steps);
  }

  // Finds the products of a place with the tokens of a group. decay_up_to: lane i has the decay
  // behind `place` up to place i. vector: `in` with the decays of columns behind it, which grow.
  __device__ static void find_pairs(const TokenPlaces& places, int32_t place, int32_t group,
                                    float decay_up_to, float4& vector, Memory& shared) {
    constexpr int kGroup = Shape::kGroup;
    constexpr int kFirst = Shape::kHasDeltaRule ? 0 : kGroup;  // without it `in` is not read
    constexpr int kCount = Memory::kVectors - kFirst;
    float parts[kCount];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const int32_t index = group * kGroup + j, other = places.first_new + index;
      if constexpr (Shape::kHasDecays) {
        if (other > place && other < places.end) {
          vector = product(vector, load_four(shared.columns.of[other]));
        }
        if (other == places.taken - 1 && place <= other)
          store_four(shared.columns.late[place], vector);
      }
      if constexpr (Shape::kHasDeltaRule) parts[j] = dot(vector, load_four(shared.in[other]));
      parts[kGroup - kFirst + j] = dot(vector, load_four(shared.out[index]));
    }
    float sum = own_sum(parts);
    if constexpr (!Shape::kHasDecays) {
      const int32_t other = places.first_new + group * kGroup + lane() % kGroup;
      sum *= __shfl_sync(~0u, decay_up_to, other);
    }
    if (lane() < kCount) shared.pairs[place][group * Memory::kVectors + kFirst + lane()] = sum;
  }

  // Finds all products of a place.
  __device__ static void prepare_place(const TokenPlaces& places, int32_t place, float own_decay,
                                       Memory& shared) {
    float4 vector = load_four(shared.in[place]);
    const float decay_up_to =
        Shape::kHasDecays ? 1.0f : product_up_to(lane() > place ? own_decay : 1.0f);
    if constexpr (Shape::kHasDecays) {
      if (place < places.replayed) {
        vector = product(vector, column_decays(places, place + 1, places.replayed, shared));
        if (places.taken == places.replayed) store_four(shared.columns.late[place], vector);
      }
    }
    if (!Shape::kHasDecays && lane() == max(places.taken - 1, 0)) shared.rest[place] = decay_up_to;
#pragma unroll 1
    for (int32_t i = 0; places.first_new + i * Shape::kGroup < places.end; ++i) {
      find_pairs(places, place, i, decay_up_to, vector, shared);
    }
  }

  __device__ static void prepare(const Params& params, const TokenPlaces& places, Memory& shared) {
    float own_decay = 1;
    if constexpr (!Shape::kHasDecays) {
      if (places.is_live(lane())) own_decay = expf(shared.log_decay[lane()]);
    }
#pragma unroll 1
    for (int32_t i = whole_warp(); i < places.end; i += Shape::kWarps) {
      if (!places.is_live(i)) continue;
      prepare_place(places, i, own_decay, shared);
      if (i >= places.first_new) prepare_new(params, places, i, shared);
    }
    if (whole_warp() != Shape::kWarps - 1) return;
    if constexpr (Shape::kHasDecays) {
      store_four(shared.columns.state, column_decays(places, 0, places.taken, shared));
      store_four(shared.columns.none, {1, 1, 1, 1});
    } else {
      const float reach = product_up_to(own_decay);
      if (lane() < Shape::kPlaces) shared.reach[lane()] = reach;
    }
  }

  // Returns the vectors that changes multiply in the state.
  __device__ static const auto& key_rows(const Memory& shared) {
    if constexpr (Shape::kHasDecays) {
      return shared.columns.late;
    } else {
      return shared.in;
    }
  }
  // Writes the vectors of tokens that the state takes in as operands, of eight places each.
  __device__ static void write_keys(const TokenPlaces& places, Memory& shared) {
    const auto& vectors = key_rows(shared);
#pragma unroll 1
    for (int32_t update = 0; update < places.updates; ++update) {
      const int32_t place = update * 8 + fourth();
      const uint32_t taken = places.before(places.taken) >> place;
#pragma unroll
      for (int i = 0; i < Shape::kSteps; i += Shape::kWarps) {
        const int32_t step = i + warp();
        const int32_t column = Shape::column_of(step, eighth() / 2) + eighth() % 2;
        const float near = vectors[place][column], far = vectors[place + 4][column];
        shared.keys[update][step][lane()] =
            pair_of(taken & 1 ? near : 0.0f, taken & 16 ? far : 0.0f);
      }
    }
  }
};

}  // namespace fovea::kernels::cuda
