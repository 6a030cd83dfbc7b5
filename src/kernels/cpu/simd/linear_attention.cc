// SPDX-License-Identifier: Apache-2.0
// The recurrences, token by token. The rows of a state do not depend on each other, so a few of
// them stay in the first-level cache for all tokens of a block. Nothing is reordered across tokens,
// so a prompt gives the same bits in one piece, in chunks and token by token. States of 16 bits are
// rounded after every token.
#include "kernels/cpu/simd/linear_attention.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/simd/convert.h"
#include "kernels/cpu/simd/sums_of_lanes.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Rows of a state at a time: enough chains of additions to hide their latency.
constexpr int32_t kGroup = kLanes == 16 ? 8 : 4;
// Tokens that a group of rows takes before the next group starts. Their q and k stay in the
// first-level cache.
constexpr int32_t kBlock = 32;

// Calls body(load, store, i) for whole vectors of [0, dim), then for the rest.
template <typename Body>
HWY_INLINE void for_vectors(int32_t dim, const Body& body) {
  int32_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    body([](const auto* from) HWY_ATTR { return load(from); },
         [](F32 value, auto* to) HWY_ATTR { store(value, to); }, i);
  }
  if (i < dim) {
    const int32_t count = dim - i;
    body([count](const auto* from) HWY_ATTR { return load_first(from, count); },
         [count](F32 value, auto* to) HWY_ATTR { store_first(value, to, count); }, i);
  }
}

// Accumulators of a group of rows. Unused ones stay zero.
struct Sums {
  F32 of[kGroup];
};

HWY_INLINE void clear(Sums& sums) {
#pragma GCC unroll 8
  for (int32_t r = 0; r < kGroup; ++r) sums.of[r] = hn::Zero(kF32);
}

HWY_INLINE void store_sums(const Sums& sums, float* to) {
#pragma GCC unroll 2
  for (int32_t r = 0; r < kGroup; r += 4) store_sums_of_lanes(sums.of + r, to + r);
}

// Sets to[r] to the dot product of state[r] and x.
template <int32_t rows, typename T>
HWY_INLINE void dot_rows(const T* state, int32_t dim, const float* x, float* to) {
  Sums sums;
  clear(sums);
  for_vectors(dim, [&](auto load_part, auto, int32_t i) HWY_ATTR {
    const F32 factor = load_part(x + i);
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; ++r) {
      sums.of[r] = hn::MulAdd(load_part(state + r * dim + i), factor, sums.of[r]);
    }
  });
  store_sums(sums, to);
}

// One step of the state: the decay, what it adds (delta[r] times `in`) and what it reads (`out`).
struct Step {
  float decay;
  const float* in;
  const float* out;
};

// Sets state[r] = decay * state[r] + delta[r] * in, then delta[r] to the dot product of state[r]
// and out.
template <int32_t rows, typename T>
HWY_INLINE void step_rows(const Step& step, T* state, int32_t dim, float* delta) {
  Sums sums;
  clear(sums);
  const F32 decay = hn::Set(kF32, step.decay);
  for_vectors(dim, [&](auto load_part, auto store_part, int32_t i) HWY_ATTR {
    const F32 in = load_part(step.in + i);
    const F32 out = load_part(step.out + i);
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; ++r) {
      T* at = state + r * dim + i;
      const F32 kept = hn::Mul(decay, load_part(at));
      const F32 value = hn::MulAdd(hn::Set(kF32, delta[r]), in, kept);
      store_part(value, at);
      sums.of[r] = hn::MulAdd(value, out, sums.of[r]);
    }
  });
  store_sums(sums, delta);
}

// Calls body.template operator()<rows>() with rows = count <= kGroup.
template <int32_t at_most, typename Body>
HWY_INLINE void with_rows(int32_t count, const Body& body) {
  if (count == at_most) {
    body.template operator()<at_most>();
  } else if constexpr (at_most > 1) {
    with_rows<at_most - 1>(count, body);
  }
}

// Returns 1 / sqrt(sum of squares + 1e-6).
float inverse_norm(const float* x, int32_t dim) {
  Sums sums;
  clear(sums);
  for_vectors(dim, [&](auto load_part, auto, int32_t i) HWY_ATTR {
    const F32 value = load_part(x + i);
    sums.of[0] = hn::MulAdd(value, value, sums.of[0]);
  });
  float total[kGroup];
  store_sums(sums, total);
  return 1.0f / sqrtf(total[0] + 1e-6f);
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// One token of one head. The factors include the norms of q and k.
struct DeltaToken {
  const float* q;
  const float* k;
  const float* v;
  float* out;
  float alpha, beta, k_factor, out_factor;
};

DeltaToken delta_token(const GatedDeltaNetParams& params, int32_t head, int64_t token) {
  const int64_t keys = static_cast<int64_t>(params.key_heads) * params.key_dim;
  const int64_t key_head = static_cast<int64_t>(head) * params.key_heads / params.value_heads;
  const int64_t values = static_cast<int64_t>(params.value_heads) * params.value_dim;
  const float* row = params.qkv + token * (2 * keys + values);
  const int64_t gate = token * params.value_heads + head;
  DeltaToken result;
  result.q = row + key_head * params.key_dim;
  result.k = result.q + keys;
  result.v = row + 2 * keys + static_cast<int64_t>(head) * params.value_dim;
  result.out =
      params.out + token * params.out_token_stride + static_cast<int64_t>(head) * params.value_dim;
  result.alpha = expf(params.log_decay[gate]);
  result.beta = params.beta[gate];
  result.k_factor = params.l2_normalise_qk ? inverse_norm(result.k, params.key_dim) : 1.0f;
  result.out_factor = params.scale;
  if (params.l2_normalise_qk) result.out_factor *= inverse_norm(result.q, params.key_dim);
  return result;
}

template <int32_t rows, typename T>
void delta_step(const DeltaToken& token, T* state, int32_t key_dim, int32_t row) {
  alignas(64) float delta[kGroup] = {};
  dot_rows<rows>(state, key_dim, token.k, delta);
  for (int32_t r = 0; r < rows; ++r) {
    const float recalled = token.alpha * token.k_factor * delta[r];
    delta[r] = token.beta * (token.v[row + r] - recalled) * token.k_factor;
  }
  step_rows<rows>({token.alpha, token.k, token.q}, state, key_dim, delta);
  for (int32_t r = 0; r < rows; ++r) token.out[row + r] = token.out_factor * delta[r];
}

struct MambaToken {
  const float* x;
  const float* b;
  const float* c;
  float* out;
  float decay, dt;
};

MambaToken mamba_token(const Mamba2Params& params, int32_t head, int64_t token) {
  const int64_t inputs = static_cast<int64_t>(params.heads) * params.head_dim;
  const int64_t states = static_cast<int64_t>(params.groups) * params.state_dim;
  const int64_t group = static_cast<int64_t>(head) * params.groups / params.heads;
  const float* row = params.xbc + token * (inputs + 2 * states);
  const int64_t gate = token * params.heads + head;
  MambaToken result;
  result.x = row + static_cast<int64_t>(head) * params.head_dim;
  result.b = row + inputs + group * params.state_dim;
  result.c = result.b + states;
  result.out =
      params.out + token * params.out_token_stride + static_cast<int64_t>(head) * params.head_dim;
  result.decay = expf(params.log_decay[gate]);
  result.dt = params.dt[gate];
  return result;
}

template <int32_t rows, typename T>
void mamba_step(const MambaToken& token, float skip, T* state, int32_t state_dim, int32_t row) {
  alignas(64) float delta[kGroup] = {};
  for (int32_t r = 0; r < rows; ++r) delta[r] = token.dt * token.x[row + r];
  step_rows<rows>({token.decay, token.b, token.c}, state, state_dim, delta);
  for (int32_t r = 0; r < rows; ++r) {
    token.out[row + r] = delta[r] + skip * token.x[row + r];
  }
}

// The rows of one head's state in the request's slot. The slot of a snapshot is slot_stride times
// the difference of slot numbers away.
template <typename T>
struct HeadState {
  T* rows;
  int32_t dim;
  int64_t slot_stride;
};

// Takes every group of rows through all tokens, block by block. make(token) describes a token;
// step<rows>(description, state, row) is one step of `rows` rows from `row` on.
template <typename Token, typename T, typename Make, typename StepOf>
HWY_INLINE void run(const StateBatch& batch, const StateSpan& span, const HeadRange& range,
                    const HeadState<T>& state, const Make& make, const StepOf& step) {
  const int64_t dim = state.dim;
  if (span.from_zero) {
    memset(state.rows + range.row_begin * dim, 0,
           static_cast<size_t>((range.row_end - range.row_begin) * dim) * sizeof(T));
  }
  for (int64_t begin = span.begin; begin < span.end; begin += kBlock) {
    const auto count = static_cast<int32_t>(least(kBlock, span.end - begin));
    Token tokens[kBlock];
    for (int32_t t = 0; t < count; ++t) tokens[t] = make(begin + t);
    for (int32_t row = range.row_begin; row < range.row_end; row += kGroup) {
      T* rows_state = state.rows + row * dim;
      with_rows<kGroup>(
          static_cast<int32_t>(least(kGroup, range.row_end - row)), [&]<int32_t rows>() HWY_ATTR {
            for (int32_t t = 0; t < count; ++t) {
              step.template operator()<rows>(tokens[t], rows_state, row);
              const int64_t slot = batch.snapshot_slots ? batch.snapshot_slots[begin + t] : -1;
              if (slot < 0) continue;
              memcpy(rows_state + (slot - span.slot) * state.slot_stride, rows_state,
                     static_cast<size_t>(rows * dim) * sizeof(T));
            }
          });
    }
  }
}

// Calls body(first element of the pool) with the type of the states.
template <typename Body>
void with_states(void* pool, DType dtype, const Body& body) {
  switch (dtype) {
    case DType::bf16:
      return body(static_cast<Bf16*>(pool));
    case DType::f16:
      return body(static_cast<F16*>(pool));
    default:
      return body(static_cast<float*>(pool));
  }
}

}  // namespace

void gated_delta_net_rows(const GatedDeltaNetParams& params, const StateSpan& span,
                          const HeadRange& range) {
  const int64_t size = static_cast<int64_t>(params.value_dim) * params.key_dim;
  const int64_t first = span.slot * params.state_slot_stride + range.head * size;
  with_states(params.state, params.state_dtype, [&]<typename T>(T* pool) HWY_ATTR {
    const HeadState<T> state = {pool + first, params.key_dim, params.state_slot_stride};
    run<DeltaToken>(
        params.batch, span, range, state,
        [&](int64_t token) HWY_ATTR { return delta_token(params, range.head, token); },
        [&]<int32_t rows>(const DeltaToken& token, T* rows_state, int32_t row)
            HWY_ATTR { delta_step<rows>(token, rows_state, params.key_dim, row); });
  });
}

void mamba2_rows(const Mamba2Params& params, const StateSpan& span, const HeadRange& range) {
  const int64_t size = static_cast<int64_t>(params.head_dim) * params.state_dim;
  const int64_t first = span.slot * params.state_slot_stride + range.head * size;
  const float skip = params.skip ? params.skip[range.head] : 0.0f;
  with_states(params.state, params.state_dtype, [&]<typename T>(T* pool) HWY_ATTR {
    const HeadState<T> state = {pool + first, params.state_dim, params.state_slot_stride};
    run<MambaToken>(
        params.batch, span, range, state,
        [&](int64_t token) HWY_ATTR { return mamba_token(params, range.head, token); },
        [&]<int32_t rows>(const MambaToken& token, T* rows_state, int32_t row)
            HWY_ATTR { mamba_step<rows>(token, skip, rows_state, params.state_dim, row); });
  });
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
