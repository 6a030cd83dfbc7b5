// SPDX-License-Identifier: Apache-2.0
// Attention whose context is distributed over GPUs: `plan` translates a batch to that of a rank,
// `queries` brings the queries of all heads to every rank, `states` merges the results over all
// keys. Messages are written into the memory of the receiver, which clears their words afterwards:
// a word that differs from kNotArrived has arrived. So a message needs neither flags nor fences,
// and takes no more bytes than its values.
#pragma once

#include "kernels/cuda/common/context_params.h"
#include "kernels/cuda/common/mail.cuh"
#include "kernels/cuda/common/overlap.cuh"
#include "kernels/cuda/portable/context/plan.cuh"

namespace fovea::kernels::cuda {

enum ContextOp { plan, queries, states_bf16, states_f16 };

constexpr int kExchangeThreads = 256;
constexpr int kExchangeAtOnce = 4;  // quads of a thread whose loads are in flight together

// One quad of the rows that are exchanged.
struct ExchangedQuad {
  int32_t row;    // row of the arrays of all heads
  int32_t head;   // head of one rank
  int32_t quad;   // number in the head
  int32_t state;  // number of the head in the message
  int32_t item;   // number of the quad in the message; -1: there is none
};

// Calls body(items) for the quads of this thread, several at a time.
template <class Body>
__device__ void for_quads(const ExchangedTokens& rows, const Body& body) {
  const uint32_t items = static_cast<uint32_t>(rows.tokens) * rows.heads * rows.quads;
  const uint32_t step = gridDim.x * kExchangeThreads;
  for (uint32_t first = blockIdx.x * kExchangeThreads + threadIdx.x; first < items;
       first += step * kExchangeAtOnce) {
    ExchangedQuad at[kExchangeAtOnce];
#pragma unroll
    for (int i = 0; i < kExchangeAtOnce; ++i) {
      const uint32_t item = first + i * step;
      const uint32_t state = item / rows.quads, token = state / rows.heads;
      at[i] = {static_cast<int32_t>(rows.first + token),
               static_cast<int32_t>(state - token * rows.heads),
               static_cast<int32_t>(item - state * rows.quads), static_cast<int32_t>(state),
               item < items ? static_cast<int32_t>(item) : -1};
    }
    body(at);
  }
}

__device__ inline int token_of(const ExchangedTokens& rows, int row) {
  return rows.order ? rows.order[row] : row;
}
__device__ inline uint4* quad_of(const ExchangedRows& rows, int token, int head, int quad) {
  return reinterpret_cast<uint4*>(static_cast<uint16_t*>(rows.data) + token * rows.token_stride +
                                  head * rows.head_stride) +
         quad;
}

using QuadsAtOnce = ExchangedQuad[kExchangeAtOnce];

struct GatherQueriesConfig {
  using Params = GatherQueriesParams;
  static constexpr int kBlocksPerSm = 2;
  static constexpr KernelTraits kTraits = {kExchangeThreads, 0, kExchangeThreads, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const Mail mail(params.boxes, 4 * params.rows.tokens * params.rows.heads * params.rows.quads);
    if (params.boxes.sends) send(params, mail);
    if (params.boxes.sends && !params.boxes.receives) return;
    mail.clear<kExchangeThreads>();
    copy_own(params);
    for (int rank = 0; params.boxes.receives && rank < params.boxes.ranks; ++rank) {
      if (mail.is_other(rank)) receive(params, mail, rank);
    }
    mail.end();
  }

 private:
  __device__ static uint4 own(const Params& params, const ExchangedQuad& at) {
    return *quad_of(params.q, token_of(params.rows, at.row), at.head, at.quad);
  }

  __device__ static void send(const Params& params, const Mail& mail) {
    for_quads(params.rows, [&](const QuadsAtOnce& at) {
      uint4 quads[kExchangeAtOnce];
#pragma unroll
      for (int i = 0; i < kExchangeAtOnce; ++i) {
        if (at[i].item >= 0) quads[i] = Mail::sent(own(params, at[i]));
      }
      for (int rank = 0; rank < params.boxes.ranks; ++rank) {
        if (!mail.is_other(rank)) continue;
#pragma unroll
        for (int i = 0; i < kExchangeAtOnce; ++i) {
          if (at[i].item >= 0) store_shared_quad(mail.to(rank) + 4 * at[i].item, quads[i]);
        }
      }
    });
  }

  __device__ static void copy_own(const Params& params) {
    const int first_head = params.boxes.rank * params.rows.heads;
    for_quads(params.rows, [&](const QuadsAtOnce& at) {
#pragma unroll
      for (int i = 0; i < kExchangeAtOnce; ++i) {
        if (at[i].item < 0) continue;
        *quad_of(params.all, at[i].row, first_head + at[i].head, at[i].quad) = own(params, at[i]);
      }
    });
  }

  __device__ static void receive(const Params& params, const Mail& mail, int rank) {
    for_quads(params.rows, [&](const QuadsAtOnce& at) {
      const uint32_t* from[kExchangeAtOnce];
      uint4 quads[kExchangeAtOnce];
#pragma unroll
      for (int i = 0; i < kExchangeAtOnce; ++i) {
        from[i] = at[i].item < 0 ? nullptr : mail.from(rank) + 4 * at[i].item;
      }
      mail.receive(from, quads);
#pragma unroll
      for (int i = 0; i < kExchangeAtOnce; ++i) {
        if (at[i].item < 0) continue;
        *quad_of(params.all, at[i].row, rank * params.rows.heads + at[i].head, at[i].quad) =
            quads[i];
      }
    });
  }
};

// A message holds the outputs of the receiver's heads, and then their LSE.
template <Type kType>
struct MergeContextConfig {
  using Params = MergeContextParams;
  static constexpr int kBlocksPerSm = 2;
  static constexpr KernelTraits kTraits = {kExchangeThreads, 0, kExchangeThreads, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const Mail mail(params.boxes, (lse_at(params) + heads(params) + 3) / 4 * 4);
    for (int rank = 0; params.boxes.sends && rank < params.boxes.ranks; ++rank) {
      if (mail.is_other(rank)) send(params, mail, rank);
    }
    if (params.boxes.sends && !params.boxes.receives) return;
    mail.clear<kExchangeThreads>();
    for_quads(params.rows, [&](const QuadsAtOnce& at) { merge(params, mail, at); });
    mail.end();
  }

 private:
  struct Weights {
    float max, sum;
  };

  __device__ static int heads(const Params& params) {
    return params.rows.tokens * params.rows.heads;
  }
  // The word of a message where the LSEs begin.
  __device__ static int lse_at(const Params& params) {
    return 4 * heads(params) * params.rows.quads;
  }
  __device__ static float own_lse(const Params& params, int row, int rank, int head) {
    const int64_t all = int64_t{1} * params.boxes.ranks * params.rows.heads;
    return params.lse[row * all + rank * params.rows.heads + head];
  }

  __device__ static void send(const Params& params, const Mail& mail, int rank) {
    const int first_head = rank * params.rows.heads;
    for_quads(params.rows, [&](const QuadsAtOnce& at) {
      uint4 quads[kExchangeAtOnce];
#pragma unroll
      for (int i = 0; i < kExchangeAtOnce; ++i) {
        if (at[i].item < 0) continue;
        quads[i] =
            Mail::sent(*quad_of(params.part, at[i].row, first_head + at[i].head, at[i].quad));
      }
#pragma unroll
      for (int i = 0; i < kExchangeAtOnce; ++i) {
        if (at[i].item >= 0) store_shared_quad(mail.to(rank) + 4 * at[i].item, quads[i]);
      }
    });
    const int count = heads(params);
    int i = blockIdx.x * kExchangeThreads + threadIdx.x;
    for (; i < count; i += gridDim.x * kExchangeThreads) {
      const float lse =
          own_lse(params, params.rows.first + i / params.rows.heads, rank, i % params.rows.heads);
      store_shared_word(mail.to(rank) + lse_at(params) + i, Mail::sent(__float_as_uint(lse)));
    }
  }

  // The state of a rank at these quads. Its LSE is -inf where there is no quad, and without
  // messages.
  __device__ static void read(const Params& params, const Mail& mail, int rank,
                              const QuadsAtOnce& at, float (&lse)[kExchangeAtOnce],
                              uint4 (&quads)[kExchangeAtOnce]) {
    const uint32_t *lse_from[kExchangeAtOnce] = {}, *from[kExchangeAtOnce] = {};
    uint32_t words[kExchangeAtOnce];
#pragma unroll
    for (int i = 0; i < kExchangeAtOnce; ++i) {
      words[i] = __float_as_uint(-infinity());
      quads[i] = {0, 0, 0, 0};
      if (at[i].item < 0) continue;
      if (!mail.is_other(rank)) {
        words[i] = __float_as_uint(own_lse(params, at[i].row, rank, at[i].head));
        quads[i] =
            *quad_of(params.part, at[i].row, rank * params.rows.heads + at[i].head, at[i].quad);
      } else if (params.boxes.receives) {
        lse_from[i] = mail.from(rank) + lse_at(params) + at[i].state;
        from[i] = mail.from(rank) + 4 * at[i].item;
      }
    }
    mail.receive(lse_from, words, from, quads);
#pragma unroll
    for (int i = 0; i < kExchangeAtOnce; ++i) lse[i] = __uint_as_float(words[i]);
  }

  __device__ static void merge(const Params& params, const Mail& mail, const QuadsAtOnce& at) {
    float max[kExchangeAtOnce], sum[kExchangeAtOnce] = {}, values[kExchangeAtOnce][8] = {};
#pragma unroll
    for (int i = 0; i < kExchangeAtOnce; ++i) max[i] = -infinity();
    for (int rank = 0; rank < params.boxes.ranks; ++rank) {
      float lse[kExchangeAtOnce];
      uint4 quads[kExchangeAtOnce];
      read(params, mail, rank, at, lse, quads);
#pragma unroll
      for (int i = 0; i < kExchangeAtOnce; ++i) {
        // Without keys the outputs may hold anything.
        if (lse[i] == -infinity()) continue;
        const float larger = fmaxf(max[i], lse[i]);
        const float before = expf(max[i] - larger), added = expf(lse[i] - larger);
        max[i] = larger;
        sum[i] = sum[i] * before + added;
        const uint32_t words[4] = {quads[i].x, quads[i].y, quads[i].z, quads[i].w};
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const float2 pair = unpack<kType>(words[word]);
          values[i][2 * word] = values[i][2 * word] * before + added * pair.x;
          values[i][2 * word + 1] = values[i][2 * word + 1] * before + added * pair.y;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kExchangeAtOnce; ++i) {
      if (at[i].item >= 0) write(params, at[i], {max[i], sum[i]}, values[i]);
    }
  }

  __device__ static void write(const Params& params, const ExchangedQuad& at, Weights weights,
                               const float (&sums)[8]) {
    const int token = token_of(params.rows, at.row);
    float factor = weights.sum > 0 ? 1 / weights.sum : 0;
    const float lse = weights.sum > 0 ? weights.max + logf(weights.sum) : -infinity();
    if (params.sinks && weights.sum > 0) factor /= 1 + expf(params.sinks[at.head] - lse);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = pack<kType>(sums[2 * i] * factor, sums[2 * i + 1] * factor);
    }
    *quad_of(params.merged, token, at.head, at.quad) = {words[0], words[1], words[2], words[3]};
    if (at.quad != 0 || !params.merged_lse) return;
    params.merged_lse[int64_t{1} * token * params.rows.heads + at.head] = lse;
  }
};

template <auto kOp>
struct ContextConfig;
template <>
struct ContextConfig<plan> : ContextPlanConfig {};
template <>
struct ContextConfig<queries> : GatherQueriesConfig {};
template <>
struct ContextConfig<states_bf16> : MergeContextConfig<bf16> {};
template <>
struct ContextConfig<states_f16> : MergeContextConfig<f16> {};

template <auto kOp>
using Config = ContextConfig<kOp>;

}  // namespace fovea::kernels::cuda
