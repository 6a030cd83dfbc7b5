// SPDX-License-Identifier: Apache-2.0
// One token of a recurrence on the rows of a state that a thread has in registers. Lanes side by
// side share a row. Every sum has one order, so all kernels of linear layers that work token by
// token give the same bits.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/common/ptx.cuh"

namespace fovea::kernels::cuda {

enum Recurrence { delta, mamba2, kda, lightning };

// The division of a row among eight lanes: one load of a warp reads whole lines of four rows, and a
// sum over a row takes three shuffles.
template <int kColumns>
struct RowLanes {
  static constexpr int kRowLanes = 8;                          // lanes that share a row
  static constexpr int kVectors = kColumns / (4 * kRowLanes);  // float4 of a lane in a row
  static constexpr int kValues = 4 * kVectors;                 // values of a lane in a row
  static constexpr int kStep = 32 / kRowLanes;                 // rows of a warp at a time
};

// Four values of a row in memory.
template <Type kType>
struct FourOf {
  using Memory = uint2;
  __device__ static float4 unpacked(uint2 four) {
    const float2 low = unpack<kType>(four.x), high = unpack<kType>(four.y);
    return {low.x, low.y, high.x, high.y};
  }
  __device__ static uint2 packed(float4 four) {
    return {pack<kType>(four.x, four.y), pack<kType>(four.z, four.w)};
  }
};
template <>
struct FourOf<f32> {
  using Memory = float4;
  __device__ static float4 unpacked(float4 four) { return four; }
  __device__ static float4 packed(float4 four) { return four; }
};

// The values of a lane in a row: columns 4 * lane to 4 * lane + 3 of every 4 * kRowLanes.
template <class Shape>
struct LaneValues {
  static constexpr int kAll = Shape::kRowLanes * Shape::kValues;

  float at[Shape::kValues];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < Shape::kValues; ++i) at[i] = 0;
  }

  // Loads the lane's columns from the first on, of which `count` exist; those beyond are 0.
  __device__ void load(const float* first, int32_t count = kAll) { load_as<f32>(first, count); }
  // The same with values of kType in memory.
  template <Type kType>
  __device__ void load_as(const void* first, int32_t count = kAll) {
    using Four = FourOf<kType>;
    const auto* const from = static_cast<const typename Four::Memory*>(first);
#pragma unroll
    for (int v = 0; v < Shape::kVectors; ++v) {
      typename Four::Memory loaded = {};
      if (v * 4 * Shape::kRowLanes < count) loaded = from[v * Shape::kRowLanes];
      const float4 four = Four::unpacked(loaded);
      at[4 * v] = four.x;
      at[4 * v + 1] = four.y;
      at[4 * v + 2] = four.z;
      at[4 * v + 3] = four.w;
    }
  }
  template <Type kType>
  __device__ void store_as(void* first) const {
    auto* const to = static_cast<typename FourOf<kType>::Memory*>(first);
#pragma unroll
    for (int v = 0; v < Shape::kVectors; ++v) to[v * Shape::kRowLanes] = packed<kType>(v);
  }
  // As store_as(), but does not keep the lines in the caches: the next pass reads them.
  template <Type kType>
  __device__ void stream_as(void* first, int32_t count = kAll) const {
    auto* const to = static_cast<typename FourOf<kType>::Memory*>(first);
#pragma unroll
    for (int v = 0; v < Shape::kVectors; ++v) {
      if (v * 4 * Shape::kRowLanes < count) __stcs(to + v * Shape::kRowLanes, packed<kType>(v));
    }
  }
  template <Type kType>
  __device__ void round() {
    if constexpr (kType != f32) {
#pragma unroll
      for (int i = 0; i < Shape::kValues; i += 2) {
        const float2 rounded = unpack<kType>(pack<kType>(at[i], at[i + 1]));
        at[i] = rounded.x;
        at[i + 1] = rounded.y;
      }
    }
  }

  template <Type kType>
  __device__ typename FourOf<kType>::Memory packed(int v) const {
    return FourOf<kType>::packed({at[4 * v], at[4 * v + 1], at[4 * v + 2], at[4 * v + 3]});
  }

  // Returns the sum of products over the lane's own columns.
  __device__ float partial_dot(const LaneValues& other) const {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < Shape::kValues; ++i) {
      sums[i % 4] = __fmaf_rn(at[i], other.at[i], sums[i % 4]);
    }
    return __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
  }
};

// Sums each value over the lanes of a row; all of them get it.
template <class Shape, int kCount>
__device__ void sum_over_lanes(float (&values)[kCount]) {
#pragma unroll
  for (int step = 1; step < Shape::kRowLanes; step *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = __fadd_rn(values[i], __shfl_xor_sync(~0u, values[i], step));
    }
  }
}

// As sum_over_lanes(), with its bits and fewer instructions: lane l of a row returns the sum of
// value l % kCount. kCount is a power of two.
template <class Shape, int kCount>
__device__ float own_sum_over_lanes(const float (&values)[kCount]) {
  static_assert(kCount <= Shape::kRowLanes && (kCount & (kCount - 1)) == 0);
  const auto lane = static_cast<int32_t>(threadIdx.x);
  float left[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) left[i] = values[i];
#pragma unroll
  for (int step = 1; step < Shape::kRowLanes; step *= 2) {
    const int count = kCount / step;  // values of a lane that are left
    if (count < 2) {
      left[0] = __fadd_rn(left[0], __shfl_xor_sync(~0u, left[0], step));
      continue;
    }
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      const float kept = lane & step ? left[2 * i + 1] : left[2 * i];
      const float given = lane & step ? left[2 * i] : left[2 * i + 1];
      left[i] = __fadd_rn(kept, __shfl_xor_sync(~0u, given, step));
    }
  }
  return left[0];
}

// A token's vectors in the columns of a lane.
template <class Shape>
struct TokenVectors {
  LaneValues<Shape> in, out;
  LaneValues<Shape> decays;  // KDA: logarithms until exponentiate()

  __device__ void exponentiate() {
    if constexpr (Shape::kKind == kda) {
#pragma unroll
      for (int i = 0; i < Shape::kValues; ++i) decays.at[i] = expf(decays.at[i]);
    }
  }
};

// The gates of a token and head, and the factors of its vectors. The decay of KDA is in its
// vectors.
struct alignas(16) TokenFactors {
  float decay, strength, in, out;
};

// A step on kRows rows of a lane. Shape names kKind, kRows and the members of RowLanes.
template <class Shape>
struct RecurrenceStep {
  using Values = LaneValues<Shape>;
  using Vectors = TokenVectors<Shape>;
  using Params = RecurrenceParams;
  static constexpr Recurrence kKind = Shape::kKind;
  static constexpr bool kHasDeltaRule = kKind == delta || kKind == kda;

  // Returns the decays of KDA for gate `gate`, token * heads + head.
  __device__ static const float* column_decays(const Params& params, int64_t gate) {
    return params.log_decay + gate * params.columns;
  }
  // Returns the decay of other kinds.
  __device__ static const float* log_decay_at(const Params& params, int64_t gate, int32_t head) {
    return params.log_decay + (kKind == lightning ? head : gate);
  }

  __device__ static TokenFactors factors_of(const Params& params, const Vectors& vectors,
                                            float log_decay, float strength) {
    const auto& [in, out, decays] = vectors;
    TokenFactors factors = {expf(log_decay), strength, 1, params.scale};
    if (kHasDeltaRule && params.l2_normalise) {
      float squares[2] = {in.partial_dot(in), out.partial_dot(out)};
      sum_over_lanes<Shape>(squares);
      factors.in = rsqrtf(squares[0] + 1e-6f);
      factors.out = params.scale * rsqrtf(squares[1] + 1e-6f);
    }
    return factors;
  }

  struct Changes {
    float of[Shape::kRows];
  };

  // Takes a token into the state. values: those of the rows. Returns the factors of `in` that the
  // rows gained.
  __device__ static Changes update(Values (&rows)[Shape::kRows], const Vectors& vectors,
                                   const TokenFactors& factors,
                                   const float (&values)[Shape::kRows]) {
    float recalled[Shape::kRows];
    Changes changes;
    decay_columns(rows, vectors);
    if constexpr (kHasDeltaRule) {
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) recalled[r] = rows[r].partial_dot(vectors.in);
      sum_over_lanes<Shape>(recalled);
    }
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      changes.of[r] = change_of(factors, values[r], kHasDeltaRule ? recalled[r] : 0.0f);
      change_row(rows[r], vectors, factors, changes.of[r]);
    }
    return changes;
  }
  // Results of update_by_own(). read: the sum of the token before, of row l % kRows in lanes l
  // from kRows to 2 * kRows - 1. change: that of row l % kRows in lane l.
  struct OwnRow {
    float read, change;
  };
  // As update() with fewer exchanges between lanes, which serve the token before, too: lane l has
  // the value of row l % kRows, whose change it computes for all. reads: the lane's parts of the
  // sums of the token before.
  __device__ static OwnRow update_by_own(Values (&rows)[Shape::kRows], const Vectors& vectors,
                                         const TokenFactors& factors, float own_value,
                                         const float (&reads)[Shape::kRows]) {
    constexpr int kRows = Shape::kRows;
    float parts[2 * kRows];
    decay_columns(rows, vectors);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      parts[r] = kHasDeltaRule ? rows[r].partial_dot(vectors.in) : 0.0f;
      parts[kRows + r] = reads[r];
    }
    float own_sum;
    if constexpr (kHasDeltaRule) {
      own_sum = own_sum_over_lanes<Shape>(parts);
    } else {
      own_sum = own_sum_over_lanes<Shape>(reads);
    }
    const float own = change_of(factors, own_value, own_sum);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      change_row(rows[r], vectors, factors, __shfl_sync(~0u, own, r, Shape::kRowLanes));
    }
    return {own_sum, own};
  }
  // Takes a token into the state again, with the bits of its update and without sums. kept: with a
  // delta rule the changes of the rows, else their values.
  __device__ static void replay(Values (&rows)[Shape::kRows], const Vectors& vectors,
                                const TokenFactors& factors, const float (&kept)[Shape::kRows]) {
    decay_columns(rows, vectors);
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      const float change = kHasDeltaRule ? kept[r] : change_of(factors, kept[r], 0);
      change_row(rows[r], vectors, factors, change);
    }
  }

  // Returns the result of a row from the sum of its state times `out`.
  __device__ static float result_of(const Params& params, int32_t head, float out_factor,
                                    float value, float read) {
    if constexpr (kKind != mamba2) return __fmul_rn(out_factor, read);
    return __fmaf_rn(params.skip ? params.skip[head] : 0.0f, value, read);
  }

 private:
  __device__ static void decay_columns(Values (&rows)[Shape::kRows], const Vectors& vectors) {
    if constexpr (kKind == kda) {
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) {
#pragma unroll
        for (int i = 0; i < Shape::kValues; ++i) {
          rows[r].at[i] = __fmul_rn(vectors.decays.at[i], rows[r].at[i]);
        }
      }
    }
  }
  // Returns the factor of `in` that a row gains.
  __device__ static float change_of(const TokenFactors& factors, float value, float recalled) {
    if constexpr (!kHasDeltaRule) return factors.strength * value;
    const float kept = kKind == kda ? factors.in : factors.decay * factors.in;
    const float lost = __fmul_rn(kept, recalled);
    return factors.strength * __fsub_rn(value, lost) * factors.in;
  }
  __device__ static void change_row(Values& row, const Vectors& vectors,
                                    const TokenFactors& factors, float change) {
#pragma unroll
    for (int i = 0; i < Shape::kValues; ++i) {
      const float old = row.at[i];
      const float decayed = kKind == kda ? old : __fmul_rn(factors.decay, old);
      row.at[i] = __fmaf_rn(change, vectors.in.at[i], decayed);
    }
  }
};

}  // namespace fovea::kernels::cuda
