// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/simd/merge_states.h"

#include <math.h>

#include "kernels/cpu/simd/convert.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// The parts of one row and head.
struct Row {
  const float* o;
  const float* lse;
  int64_t o_stride, lse_stride;
  int32_t parts;
  float maximum = -INFINITY;  // maximum of lse
  float sum = 0;              // sum of the weights
};

// Returns e^(lse - maximum), or 0 for an empty part: its o is never read, as it may hold anything.
float weight_of(const Row& row, int32_t part) {
  const float lse = row.lse[part * row.lse_stride];
  return lse == -INFINITY ? 0.0f : expf(lse - row.maximum);
}

void find_weights(Row& row) {
  for (int32_t part = 0; part < row.parts; ++part) {
    const float lse = row.lse[part * row.lse_stride];
    if (lse > row.maximum) row.maximum = lse;
  }
  for (int32_t part = 0; part < row.parts; ++part) row.sum += weight_of(row, part);
}

constexpr int32_t kVectors = 8;

// Merges `count` elements from `from` on: at most kVectors whole vectors and a rest.
void merge_span(const Row& row, int64_t from, int32_t count, float* out) {
  F32 sums[kVectors];
  const int32_t vectors = (count + kLanes - 1) / kLanes;
  for (int32_t i = 0; i < vectors; ++i) sums[i] = hn::Zero(kF32);
  for (int32_t part = 0; part < row.parts; ++part) {
    const float weight = weight_of(row, part);
    if (weight == 0) continue;
    const F32 w = hn::Set(kF32, weight / row.sum);
    const float* o = row.o + part * row.o_stride + from;
    for (int32_t i = 0; i < vectors; ++i) {
      const int32_t left = count - i * kLanes;
      const F32 value = left >= kLanes ? load(o + i * kLanes) : load_first(o + i * kLanes, left);
      sums[i] = hn::MulAdd(w, value, sums[i]);
    }
  }
  // All parts have been read; `out` may be one of them.
  for (int32_t i = 0; i < vectors; ++i) {
    const int32_t left = count - i * kLanes;
    if (left >= kLanes) {
      store(sums[i], out + from + i * kLanes);
    } else {
      store_first(sums[i], out + from + i * kLanes, left);
    }
  }
}

}  // namespace

void merge_state_rows(const MergeStatesParams& params, int64_t begin, int64_t end) {
  constexpr int32_t kSpan = kVectors * kLanes;
  for (int64_t at = begin; at < end; ++at) {
    Row row;
    row.o = params.o + at * params.dim;
    row.lse = params.lse + at;
    row.o_stride = params.o_part_stride;
    row.lse_stride = params.lse_part_stride;
    row.parts = params.parts;
    find_weights(row);
    const float lse = row.maximum + logf(row.sum);
    if (params.sinks && row.sum > 0) row.sum *= 1 + expf(params.sinks[at % params.heads] - lse);
    for (int32_t from = 0; from < params.dim; from += kSpan) {
      const int32_t left = params.dim - from;
      merge_span(row, from, left < kSpan ? left : kSpan, params.out + at * params.dim);
    }
    if (params.out_lse) params.out_lse[at] = lse;
  }
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
