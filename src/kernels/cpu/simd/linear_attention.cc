// SPDX-License-Identifier: Apache-2.0
// The recurrences, token by token. The rows of a state do not depend on each other, so a few of
// them stay in the first-level cache for all tokens of a block. Nothing is reordered across tokens,
// so a prompt gives the same bits in one piece, in several and token by token. States of 16 bits
// are rounded after every token.
#include "kernels/cpu/simd/linear_attention.h"

#include <hwy/contrib/math/math-inl.h>
#include <string.h>

#include "kernels/cpu/simd/linear_heads.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Tokens that a group of rows takes before the next group starts. Their q and k stay in the
// first-level cache.
constexpr int32_t kBlock = 32;

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

// One step of the state: the decay of each column or, without `decays`, of all; the row that it
// adds, times delta[r]; the row that it reads.
struct Step {
  float decay;
  const float* in;
  const float* out;
  const float* decays = nullptr;  // [dim]
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
    const F32 column_decay = step.decays ? load_part(step.decays + i) : decay;
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; ++r) {
      T* at = state + r * dim + i;
      const F32 kept = hn::Mul(column_decay, load_part(at));
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

// One token of one head. The factors include the norms of q and k.
struct DeltaToken {
  const float* q;
  const float* k;
  const float* v;
  float* out;
  float alpha, beta, k_factor, out_factor;
};

// Describes a token of gated delta net or of KDA, without its decay.
template <typename Params>
DeltaToken delta_token(const Params& params, int32_t head, int64_t token) {
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

// A token of KDA: `decayed_k` is k times the decay of each column.
struct KdaToken {
  DeltaToken delta;
  const float* decays;
  const float* decayed_k;
};

template <int32_t rows, typename T>
void kda_step(const KdaToken& token, T* state, int32_t key_dim, int32_t row) {
  const DeltaToken& own = token.delta;
  alignas(64) float delta[kGroup] = {};
  dot_rows<rows>(state, key_dim, token.decayed_k, delta);
  for (int32_t r = 0; r < rows; ++r) {
    delta[r] = own.beta * (own.v[row + r] - own.k_factor * delta[r]) * own.k_factor;
  }
  step_rows<rows>({0, own.k, own.q, token.decays}, state, key_dim, delta);
  for (int32_t r = 0; r < rows; ++r) own.out[row + r] = own.out_factor * delta[r];
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

// A token of the selective scan, for the channels of its group.
struct ScanToken {
  const float* x;   // [channels of the group]
  const float* dt;  // [channels of the group]
  const float* b;
  const float* c;
  float* out;
};

ScanToken scan_token(const Mamba1Params& params, int32_t group, int64_t token) {
  const int64_t states = static_cast<int64_t>(params.groups) * params.state_dim;
  const int64_t first = static_cast<int64_t>(group) * (params.channels / params.groups);
  const float* row = params.xbc + token * (params.channels + 2 * states);
  ScanToken result;
  result.x = row + first;
  result.dt = params.dt + token * params.channels + first;
  result.b = row + params.channels + static_cast<int64_t>(group) * params.state_dim;
  result.c = result.b + states;
  result.out = params.out + token * params.out_token_stride + first;
  return result;
}

// `a` and `skip` are those of the first row; skip may be null.
template <int32_t rows, typename T>
HWY_INLINE void scan_step(const ScanToken& token, const float* a, const float* skip, T* state,
                          int32_t dim, int32_t row) {
  alignas(64) float sums_of_rows[kGroup] = {};
  Sums sums;
  clear(sums);
  for_vectors(dim, [&](auto load_part, auto store_part, int32_t i) HWY_ATTR {
    const F32 b = load_part(token.b + i);
    const F32 c = load_part(token.c + i);
#pragma GCC unroll 8
    for (int32_t r = 0; r < rows; ++r) {
      T* at = state + r * dim + i;
      const float dt = token.dt[row + r];
      const F32 power = hn::Mul(hn::Set(kF32, dt), load_part(a + r * dim + i));
      // Exp() makes zeros of NaNs.
      const F32 decay = hn::IfThenElse(hn::IsNaN(power), power, hn::Exp(kF32, power));
      const F32 kept = hn::Mul(decay, load_part(at));
      const F32 value = hn::MulAdd(hn::Set(kF32, dt * token.x[row + r]), b, kept);
      store_part(value, at);
      sums.of[r] = hn::MulAdd(value, c, sums.of[r]);
    }
  });
  store_sums(sums, sums_of_rows);
  for (int32_t r = 0; r < rows; ++r) {
    const float skipped = skip ? skip[r] * token.x[row + r] : 0.0f;
    token.out[row + r] = sums_of_rows[r] + skipped;
  }
}

struct LightningToken {
  const float *q, *k, *v;
  float* out;
};

// The rows of one head's state in the request's slot. The slot of a snapshot is slot_stride times
// the difference of slot numbers away.
template <typename T>
struct HeadState {
  T* rows;
  int32_t dim;
  int64_t slot_stride;
  int32_t block = kBlock;  // tokens of a block, kBlock or fewer
};

// Takes every group of rows through all tokens, block by block. make(token, t) describes a token,
// number t of its block; step<rows>(description, state, row) is one step of
// `rows` rows from `row` on.
template <typename Token, typename T, typename Make, typename StepOf>
HWY_INLINE void run(const StateBatch& batch, const StateSpan& span, const HeadRange& range,
                    const HeadState<T>& state, const Make& make, const StepOf& step) {
  const int64_t dim = state.dim;
  if (span.from_zero) {
    memset(state.rows + range.row_begin * dim, 0,
           static_cast<size_t>((range.row_end - range.row_begin) * dim) * sizeof(T));
  }
  for (int64_t begin = span.begin; begin < span.end; begin += state.block) {
    const auto count = static_cast<int32_t>(least(state.block, span.end - begin));
    Token tokens[kBlock];
    for (int32_t t = 0; t < count; ++t) tokens[t] = make(begin + t, t);
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

}  // namespace

void gated_delta_net_rows(const GatedDeltaNetParams& params, const StateSpan& span,
                          const HeadRange& range) {
  const int64_t size = static_cast<int64_t>(params.value_dim) * params.key_dim;
  const int64_t first = span.slot * params.state_slot_stride + range.head * size;
  with_states(params.state, params.state_dtype, [&]<typename T>(T* pool) HWY_ATTR {
    const HeadState<T> state = {pool + first, params.key_dim, params.state_slot_stride};
    run<DeltaToken>(
        params.batch, span, range, state,
        [&](int64_t token, int32_t) HWY_ATTR {
          DeltaToken made = delta_token(params, range.head, token);
          made.alpha = expf(params.log_decay[token * params.value_heads + range.head]);
          return made;
        },
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
        [&](int64_t token, int32_t) HWY_ATTR { return mamba_token(params, range.head, token); },
        [&]<int32_t rows>(const MambaToken& token, T* rows_state, int32_t row)
            HWY_ATTR { mamba_step<rows>(token, skip, rows_state, params.state_dim, row); });
  });
}

void mamba1_rows(const Mamba1Params& params, const StateSpan& span, const HeadRange& range) {
  const int32_t channels = params.channels / params.groups, dim = params.state_dim;
  const int64_t first_channel = static_cast<int64_t>(range.head) * channels;
  const float* a = params.a + first_channel * dim;
  const float* skip = params.skip ? params.skip + first_channel : nullptr;
  with_states(params.state, params.state_dtype, [&]<typename T>(T* pool) HWY_ATTR {
    const HeadState<T> state = {pool + span.slot * params.state_slot_stride + first_channel * dim,
                                dim, params.state_slot_stride};
    run<ScanToken>(
        params.batch, span, range, state,
        [&](int64_t token, int32_t) HWY_ATTR { return scan_token(params, range.head, token); },
        [&]<int32_t rows>(const ScanToken& token, T* rows_state, int32_t row) HWY_ATTR {
          scan_step<rows>(token, a + static_cast<int64_t>(row) * dim, skip ? skip + row : nullptr,
                          rows_state, dim, row);
        });
  });
}

void lightning_rows(const LightningParams& params, const StateSpan& span, const HeadRange& range) {
  const int64_t size = static_cast<int64_t>(params.value_dim) * params.key_dim;
  const int64_t first = span.slot * params.state_slot_stride + range.head * size;
  const int64_t keys = static_cast<int64_t>(params.key_heads) * params.key_dim;
  const int64_t values = static_cast<int64_t>(params.value_heads) * params.value_dim;
  const int64_t key_head = static_cast<int64_t>(range.head) * params.key_heads / params.value_heads;
  const float decay = expf(params.log_decay[range.head]);
  with_states(params.state, params.state_dtype, [&]<typename T>(T* pool) HWY_ATTR {
    const HeadState<T> state = {pool + first, params.key_dim, params.state_slot_stride};
    run<LightningToken>(
        params.batch, span, range, state,
        [&](int64_t token, int32_t) HWY_ATTR {
          const float* row = params.qkv + token * (2 * keys + values);
          const float* q = row + key_head * params.key_dim;
          return LightningToken{
              q, q + keys, row + 2 * keys + range.head * params.value_dim,
              params.out + token * params.out_token_stride + range.head * params.value_dim};
        },
        [&]<int32_t rows>(const LightningToken& token, T* rows_state, int32_t row) HWY_ATTR {
          alignas(64) float delta[kGroup] = {};
          for (int32_t r = 0; r < rows; ++r) delta[r] = token.v[row + r];
          step_rows<rows>({decay, token.k, token.q}, rows_state, params.key_dim, delta);
          for (int32_t r = 0; r < rows; ++r) token.out[row + r] = params.scale * delta[r];
        });
  });
}

void kda_rows(const KdaParams& params, const StateSpan& span, const HeadRange& range) {
  const int64_t dim = params.key_dim;
  const int64_t first = span.slot * params.state_slot_stride + range.head * params.value_dim * dim;
  // Rows of a block's decays, and of its keys times them.
  alignas(64) float decays[kMaxKdaKeys], decayed_k[kMaxKdaKeys];
  const auto block = static_cast<int32_t>(least(kBlock, kMaxKdaKeys / dim));
  with_states(params.state, params.state_dtype, [&]<typename T>(T* pool) HWY_ATTR {
    const HeadState<T> state = {pool + first, params.key_dim, params.state_slot_stride, block};
    run<KdaToken>(
        params.batch, span, range, state,
        [&](int64_t token, int32_t t) HWY_ATTR {
          const KdaToken made = {delta_token(params, range.head, token), decays + t * dim,
                                 decayed_k + t * dim};
          const float* log_decay =
              params.log_decay + (token * params.value_heads + range.head) * dim;
          for (int64_t i = 0; i < dim; ++i) {
            decays[t * dim + i] = expf(log_decay[i]);
            decayed_k[t * dim + i] = decays[t * dim + i] * made.delta.k[i];
          }
          return made;
        },
        [&]<int32_t rows>(const KdaToken& token, T* rows_state, int32_t row)
            HWY_ATTR { kda_step<rows>(token, rows_state, params.key_dim, row); });
  });
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
