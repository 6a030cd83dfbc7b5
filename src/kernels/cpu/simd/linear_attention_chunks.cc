// SPDX-License-Identifier: Apache-2.0
// The recurrences in chunks of tokens, as products of matrices (arXiv:2412.06464, section 3.3;
// arXiv:2405.21060, section 6). With E_ts the product of the decays of tokens s + 1 to t, E_t0 that
// of all up to t, and S the state before the chunk:
//
//   u_t = beta_t (v_t - E_t0 S k_t) - beta_t sum_{s<t} E_ts (k_s k_t) u_s
//         (Mamba2: beta_t v_t; lightning attention: v_t)
//   o_t = E_t0 S q_t + sum_{s<=t} E_ts (k_s q_t) u_s
//   S   = E_C0 S + sum_s E_Cs u_s k_s^T
//
// E is a product of decays, never a quotient, so strong decays lose nothing. States are transposed
// into panels of rows for all tokens of a request, so that lanes hold rows in every product. Rows
// do not depend on each other. Products k_s k_t and k_s q_t serve all heads of one key head.
#include <string.h>

#include "kernels/cpu/simd/chunk_products.h"
#include "kernels/cpu/simd/linear_attention.h"
#include "kernels/cpu/simd/linear_heads.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

static_assert(kChunkTokens % kPanel == 0);
constexpr int32_t kChunkPanels = kChunkTokens / kPanel;
// State that a task keeps on its stack: 128 KiB.
constexpr int32_t kStateFloats = 32768;
constexpr int32_t kMaxPanels = 64;

// Up to kPanel rows of one head's state.
struct Panel {
  int32_t head, row, count;
};

// Panels whose heads share a key head.
struct Pass {
  Panel panels[kMaxPanels];
  int32_t count = 0;
  int32_t key_head = 0;
};

struct Scratch {
  alignas(64) float state[kStateFloats];                      // [panel][key][kPanel]
  alignas(64) float kq[2 * kChunkTokens * kMaxChunkKeys];     // rows of k, then those of q
  alignas(64) float k_panels[kChunkTokens * kMaxChunkKeys];   // [panel of tokens][key][kPanel]
  alignas(64) float scores[2 * kChunkTokens * kChunkTokens];  // [panel of tokens][row of kq]
  alignas(64) float recalls[kChunkTokens * kChunkTokens];     // -beta_t E_ts (k_s k_t)
  alignas(64) float weights[kChunkTokens * kChunkTokens];     // E_ts (k_s q_t)
  alignas(64) float decays[kChunkTokens];                     // E_Cs
  alignas(64) float products[2 * kChunkTokens * kPanel];      // S k_t, then S q_t
  alignas(64) float changes[kChunkTokens * kPanel];           // u_t
  float from_start[kChunkTokens];                             // E_t0
};

struct Chunk {
  int64_t begin;
  int32_t tokens;
};

// Returns the tokens from `begin` on, up to the first that has a snapshot.
Chunk chunk_at(const ChunkedLayer& layer, const StateSpan& span, int64_t begin) {
  const auto limit = static_cast<int32_t>(least(kChunkTokens, span.end - begin));
  if (!layer.batch.snapshot_slots) return {begin, limit};
  for (int32_t t = 0; t < limit; ++t) {
    if (layer.batch.snapshot_slots[begin + t] >= 0) return {begin, t + 1};
  }
  return {begin, limit};
}

// Sets to[0, dim) to factor * from.
void scale_row(const float* from, int32_t dim, float factor, float* to) {
  const F32 f = hn::Set(kF32, factor);
  for_vectors(dim, [&](auto load_part, auto store_part, int32_t i)
                       HWY_ATTR { store_part(hn::Mul(f, load_part(from + i)), to + i); });
}

// Gathers k and q of a chunk, normalised and scaled, and the transposed k.
void gather_keys(const ChunkedLayer& layer, const Chunk& chunk, int32_t key_head,
                 Scratch& scratch) {
  const int32_t dim = layer.key_dim;
  for (int32_t t = 0; t < chunk.tokens; ++t) {
    const int64_t at = (chunk.begin + t) * layer.token_stride + int64_t{key_head} * dim;
    const float *k = layer.k + at, *q = layer.q + at;
    const bool norms = layer.l2_normalise_qk;
    scale_row(k, dim, norms ? inverse_norm(k, dim) : 1.0f, scratch.kq + t * dim);
    scale_row(q, dim, layer.scale * (norms ? inverse_norm(q, dim) : 1.0f),
              scratch.kq + (chunk.tokens + t) * dim);
  }
  for (int32_t panel = 0; panel * kPanel < chunk.tokens; ++panel) {
    float* to = scratch.k_panels + panel * dim * kPanel;
    for (int32_t lane = 0; lane < kPanel; ++lane) {
      const int32_t t = panel * kPanel + lane;
      const float* from = scratch.kq + t * dim;
      for (int32_t i = 0; i < dim; ++i) to[i * kPanel + lane] = t < chunk.tokens ? from[i] : 0.0f;
    }
  }
}

// Computes k_s k_t and k_s q_t, but not the panels of s behind t.
void score_keys(const ChunkedLayer& layer, const Chunk& chunk, Scratch& scratch) {
  const int32_t dim = layer.key_dim;
  const Left kq = {scratch.kq, dim, 1};
  for (int32_t panel = 0; panel * kPanel < chunk.tokens; ++panel) {
    const int32_t first = panel * kPanel, rows = chunk.tokens - first;
    const float* right = scratch.k_panels + panel * dim * kPanel;
    float* out = scratch.scores + panel * 2 * kChunkTokens * kPanel;
    if (layer.delta) multiply(kq.from(first, 0), right, rows, dim, out + first * kPanel);
    const int32_t q_row = chunk.tokens + first;
    multiply(kq.from(q_row, 0), right, rows, dim, out + q_row * kPanel);
  }
}

// Weighs the scores by the decays of a head.
void weigh(const ChunkedLayer& layer, const Chunk& chunk, int32_t head, Scratch& scratch) {
  float all = 1;
  for (int32_t s = 0; s < kChunkTokens; ++s) scratch.decays[s] = 0;
  for (int32_t t = 0; t < chunk.tokens; ++t) {
    const int64_t gate = (chunk.begin + t) * layer.value_heads + head;
    const float alpha = expf(layer.log_decay[layer.fixed_decay ? head : gate]);
    all *= alpha;
    scratch.from_start[t] = all;
    for (int32_t s = 0; s < t; ++s) scratch.decays[s] *= alpha;
    scratch.decays[t] = 1;
    const F32 minus_beta = hn::Set(kF32, layer.delta ? -layer.beta[gate] : 0.0f);
    for (int32_t s = 0; s <= t; s += kLanes) {
      const F32 decay = load(scratch.decays + s);
      const float* k_scores =
          scratch.scores + (s / kPanel * 2 * kChunkTokens + t) * kPanel + s % kPanel;
      const F32 weight = hn::Mul(decay, load(k_scores + chunk.tokens * kPanel));
      store(weight, scratch.weights + t * kChunkTokens + s);
      if (!layer.delta) continue;
      store(hn::Mul(minus_beta, hn::Mul(decay, load(k_scores))),
            scratch.recalls + t * kChunkTokens + s);
    }
  }
}

// Moves `count` columns between a panel and memory that has only these.
HWY_INLINE F32 load_columns(const float* from, int32_t count) {
  if (count >= kLanes) return load(from);
  return count > 0 ? load_first(from, count) : hn::Zero(kF32);
}
HWY_INLINE void store_columns(F32 value, float* to, int32_t count) {
  if (count >= kLanes) return store(value, to);
  if (count > 0) store_first(value, to, count);
}

// Computes the outputs of a panel, and its state after the chunk.
void run_panel(const ChunkedLayer& layer, const Chunk& chunk, const Panel& panel, float* state,
               Scratch& scratch) {
  const int32_t dim = layer.key_dim, tokens = chunk.tokens;
  const Left kq = {scratch.kq, dim, 1};
  float* const recalled = scratch.products;
  float* const read = scratch.products + tokens * kPanel;
  if (layer.delta) {
    multiply(kq, state, 2 * tokens, dim, recalled);
  } else {
    multiply(kq.from(tokens, 0), state, tokens, dim, read);
  }
  const int64_t column = int64_t{panel.head} * layer.value_dim + panel.row;
  const float* const v = layer.v + chunk.begin * layer.token_stride + column;
  for (int32_t t = 0; t < tokens; ++t) {
    const int64_t gate = (chunk.begin + t) * layer.value_heads + panel.head;
    const F32 beta = hn::Set(kF32, layer.beta ? layer.beta[gate] : 1.0f);
    const F32 decay = hn::Set(kF32, scratch.from_start[t]);
    for (int32_t c = 0; c < kPanel; c += kLanes) {
      F32 change = load_columns(v + t * layer.token_stride + c, panel.count - c);
      if (layer.delta) change = hn::NegMulAdd(decay, load(recalled + t * kPanel + c), change);
      store(hn::Mul(beta, change), scratch.changes + t * kPanel + c);
      float* const at = read + t * kPanel + c;
      store(hn::Mul(decay, load(at)), at);
    }
  }
  if (layer.delta) {
    add_lower<false>(scratch.recalls, kChunkTokens, scratch.changes, tokens, scratch.changes);
  }
  add_lower<true>(scratch.weights, kChunkTokens, scratch.changes, tokens, read);
  const F32 skip = hn::Set(kF32, layer.skip ? layer.skip[panel.head] : 0.0f);
  float* const out = layer.out + chunk.begin * layer.out_token_stride + column;
  for (int32_t t = 0; t < tokens; ++t) {
    const F32 decay = hn::Set(kF32, scratch.decays[t]);
    for (int32_t c = 0; c < kPanel; c += kLanes) {
      F32 value = load(read + t * kPanel + c);
      if (layer.skip) {
        value =
            hn::MulAdd(skip, load_columns(v + t * layer.token_stride + c, panel.count - c), value);
      }
      store_columns(value, out + t * layer.out_token_stride + c, panel.count - c);
      float* const change = scratch.changes + t * kPanel + c;
      store(hn::Mul(decay, load(change)), change);
    }
  }
  scale_and_add(scratch.from_start[tokens - 1], {scratch.kq, 1, dim}, scratch.changes, dim, tokens,
                state);
}

// Calls body(first element of the row in the slot, its column of the panels) for all rows.
template <typename T, typename Body>
void for_state_rows(const ChunkedLayer& layer, const Pass& pass, int64_t slot, T* pool,
                    Scratch& scratch, const Body& body) {
  for (int32_t i = 0; i < pass.count; ++i) {
    const Panel& panel = pass.panels[i];
    for (int32_t r = 0; r < panel.count; ++r) {
      const int64_t row = int64_t{panel.head} * layer.value_dim + panel.row + r;
      body(pool + slot * layer.state_slot_stride + row * layer.key_dim,
           scratch.state + i * layer.key_dim * kPanel + r);
    }
  }
}

void load_states(const ChunkedLayer& layer, const Pass& pass, int64_t slot, Scratch& scratch) {
  with_states(layer.state, layer.state_dtype, [&](auto* pool) {
    for_state_rows(layer, pass, slot, pool, scratch, [&](const auto* from, float* to) {
      alignas(64) float row[kMaxChunkKeys + kLanes];
      load_row(from, layer.key_dim, layer.key_dim, row);
      for (int32_t i = 0; i < layer.key_dim; ++i) to[i * kPanel] = row[i];
    });
  });
}

void store_states(const ChunkedLayer& layer, const Pass& pass, int64_t slot, Scratch& scratch) {
  with_states(layer.state, layer.state_dtype, [&](auto* pool) {
    for_state_rows(layer, pass, slot, pool, scratch, [&](auto* to, const float* from) {
      alignas(64) float row[kMaxChunkKeys + kLanes];
      for (int32_t i = 0; i < layer.key_dim; ++i) row[i] = from[i * kPanel];
      store_row(row, layer.key_dim, to);
    });
  });
}

void run_pass(const ChunkedLayer& layer, const StateSpan& span, const Pass& pass,
              Scratch& scratch) {
  const int64_t panel_size = int64_t{layer.key_dim} * kPanel;
  memset(scratch.state, 0, static_cast<size_t>(pass.count * panel_size) * sizeof(float));
  if (!span.from_zero) load_states(layer, pass, span.slot, scratch);
  for (int64_t begin = span.begin; begin < span.end;) {
    const Chunk chunk = chunk_at(layer, span, begin);
    gather_keys(layer, chunk, pass.key_head, scratch);
    score_keys(layer, chunk, scratch);
    for (int32_t i = 0; i < pass.count; ++i) {
      const int32_t head = pass.panels[i].head;
      if (i == 0 || head != pass.panels[i - 1].head) weigh(layer, chunk, head, scratch);
      run_panel(layer, chunk, pass.panels[i], scratch.state + i * panel_size, scratch);
    }
    begin += chunk.tokens;
    const int64_t snapshot =
        layer.batch.snapshot_slots ? layer.batch.snapshot_slots[begin - 1] : -1;
    if (snapshot >= 0) store_states(layer, pass, snapshot, scratch);
  }
  store_states(layer, pass, span.slot, scratch);
}

}  // namespace

void chunked_rows(const ChunkedLayer& layer, const StateSpan& span, int64_t begin, int64_t end) {
  Scratch scratch;
  const auto fitting =
      static_cast<int32_t>(least(kMaxPanels, kStateFloats / (int64_t{layer.key_dim} * kPanel)));
  while (begin < end) {
    Pass pass;
    while (begin < end && pass.count < fitting) {
      const auto head = static_cast<int32_t>(begin / layer.value_dim);
      const auto row = static_cast<int32_t>(begin % layer.value_dim);
      const auto key_head =
          static_cast<int32_t>(int64_t{head} * layer.key_heads / layer.value_heads);
      if (pass.count > 0 && key_head != pass.key_head) break;
      pass.key_head = key_head;
      const auto count =
          static_cast<int32_t>(least(kPanel, least(end - begin, int64_t{layer.value_dim} - row)));
      pass.panels[pass.count++] = {head, row, count};
      begin += count;
    }
    run_pass(layer, span, pass, scratch);
  }
}

}  // namespace fovea::kernels::cpu::FOVEA_ISA
