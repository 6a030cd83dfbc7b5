// SPDX-License-Identifier: Apache-2.0
// Decode of linear layers on Hopper: portable/recurrence for passes with one token a request. A
// decode step is a copy of all states with a little arithmetic between. A block is one warp, which
// waits for no other: the copy engine brings all its rows at once.
//
//   grid: x = (head, rows of a block), y = request
//
//   state ──► shared memory      while the preceding kernel still runs
//   inputs of the first token
//   tile: registers ──► state    updated with the bits of portable/recurrence
//
// Memory serves reads and writes faster that are close to each other. Blocks that end soon stay
// close: the next one begins where the last one did, on whatever multiprocessor is free.
#pragma once

#include "kernels/cuda/sm90/recurrent_decode/config.cuh"

namespace fovea::kernels::cuda {

template <class Shape>
struct RecurrentDecode {
  using Params = RecurrenceParams;
  using Memory = DecodeMemory<Shape>;
  using Place = DecodeRows<Shape>;
  using Values = LaneValues<Shape>;
  using Step = RecurrenceStep<Shape>;
  using Vectors = TokenVectors<Shape>;
  using Rows = Values[Shape::kRows];
  static constexpr int kBlocksPerSm = Shape::kBlocksPerSm;
  static constexpr KernelTraits kTraits = {32, sizeof(Memory), Shape::kBlockRows, 0};
  static_assert((sizeof(Memory) + 1024) * Shape::kBlocksPerSm <= kMaxSharedBytes + 1024);

  struct TileToken {
    int32_t tile, token;
  };
  struct TokenInputs {
    const Vectors& vectors;
    TokenFactors factors;
    const float* values;  // from the tile's first row on
  };

  __device__ static int lane_row() { return static_cast<int>(threadIdx.x) / Shape::kRowLanes; }
  __device__ static int lane_column() {
    return static_cast<int>(threadIdx.x) % Shape::kRowLanes * 4;
  }

  // Returns the address of a tile in a slot.
  __device__ static unsigned char* state_at(const Params& params, const Place& place, int32_t tile,
                                            int32_t slot) {
    const int64_t index =
        slot * params.state_slot_stride +
        static_cast<int64_t>(place.head * params.rows + place.row) * Shape::kColumns;
    return static_cast<unsigned char*>(params.state) + index * type_bytes(Shape::kState) +
           tile * Shape::kTileBytes;
  }
  __device__ static const float* vectors_at(const Params& params, const Place& place,
                                            int32_t token) {
    return params.mixed + token * params.mixed_stride +
           short_quotient(place.head, params.key_group) * Shape::kColumns;
  }
  __device__ static const float* values_at(const Params& params, const Place& place,
                                           int32_t token) {
    return params.mixed + token * params.mixed_stride + params.values_at +
           place.head * params.rows + place.row;
  }
  __device__ static int64_t gate_of(const Params& params, const Place& place, int32_t token) {
    return static_cast<int64_t>(token) * params.heads + place.head;
  }

  // Starts the copies of the state. One lane calls this and start_inputs().
  __device__ static void start_state(const Params& params, const Place& place, Memory& shared) {
    if (place.span.from_zero) return;
#pragma unroll
    for (int i = 0; i < Shape::kTiles; ++i) {
      if (i >= place.tiles) continue;
      shared.tiles[i].arrive_expecting(Shape::kTileBytes);
      load_bytes(shared.state[i], state_at(params, place, i, place.span.slot), Shape::kTileBytes,
                 shared.tiles[i]);
    }
  }
  // Starts the copies of the inputs of the first token.
  __device__ static void start_inputs(const Params& params, const Place& place, Memory& shared) {
    const int32_t token = place.span.begin;
    const int64_t gate = gate_of(params, place, token);
    const float* const vectors = vectors_at(params, place, token);
    const auto value_bytes = static_cast<int>(place.tiles * Shape::kTileRows * sizeof(float));
    TransactionBarrier& inputs = shared.inputs;
    constexpr int kVectorBytes = sizeof(shared.in) + sizeof(shared.out) +
                                 (Shape::kKind == kda ? sizeof(shared.log_decays) : 0);
    inputs.arrive_expecting(kVectorBytes + value_bytes);
    load_bytes(shared.in, vectors + params.in_at, sizeof(shared.in), inputs);
    load_bytes(shared.out, vectors + params.out_at, sizeof(shared.out), inputs);
    load_bytes(shared.values, values_at(params, place, token), value_bytes, inputs);
    if constexpr (Shape::kKind == kda) {
      load_bytes(shared.log_decays, Step::column_decays(params, gate), sizeof(shared.log_decays),
                 inputs);
    } else {
      copy_word_async(&shared.log_decay, Step::log_decay_at(params, gate, place.head), 4);
    }
    if constexpr (Shape::kKind != lightning) {
      copy_word_async(&shared.strength, params.strength + gate, 4);
    }
    inputs.arrive_after_copies();
  }

  __device__ static void load_vectors(Vectors& vectors, const float* in, const float* out,
                                      const float* log_decays) {
    vectors.in.load(in + lane_column());
    vectors.out.load(out + lane_column());
    if constexpr (Shape::kKind == kda) {
      vectors.decays.load(log_decays + lane_column());
      vectors.exponentiate();
    }
  }

  // Calls body(row, index of its first value in the tile).
  template <typename Body>
  __device__ static void for_rows(Rows& rows, Body body) {
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      body(rows[r], (lane_row() + r * Shape::kStep) * Shape::kColumns + lane_column());
    }
  }
  __device__ static void load_rows(Rows& rows, const unsigned char* tile) {
    for_rows(rows, [&](Values& row, int at) {
      row.template load_as<Shape::kState>(tile + at * type_bytes(Shape::kState));
    });
  }
  __device__ static void stream_rows(Rows& rows, unsigned char* tile) {
    for_rows(rows, [&](Values& row, int at) {
      row.template stream_as<Shape::kState>(tile + at * type_bytes(Shape::kState));
    });
  }

  __device__ static void store_results(const Params& params, const Place& place, int32_t tile,
                                       int32_t token, const float (&results)[Shape::kRows]) {
    if (lane_column() != 0) return;
    float* const to = params.result + token * params.result_stride +
                      static_cast<int64_t>(place.head) * params.rows + place.row +
                      tile * Shape::kTileRows + lane_row();
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) to[r * Shape::kStep] = results[r];
  }

  __device__ static TokenFactors first_factors(const Params& params, const Memory& shared) {
    Vectors vectors;
    vectors.in.load(shared.in + lane_column());
    vectors.out.load(shared.out + lane_column());
    return Step::factors_of(params, vectors, Shape::kKind == kda ? 0.0f : shared.log_decay,
                            Shape::kKind == lightning ? 1.0f : shared.strength);
  }
  __device__ static TokenFactors load_factors(const Params& params, const Place& place,
                                              int32_t token, const Vectors& vectors) {
    const int64_t gate = gate_of(params, place, token);
    float log_decay = 0, strength = 1;
    if constexpr (Shape::kKind != kda) log_decay = *Step::log_decay_at(params, gate, place.head);
    if constexpr (Shape::kKind != lightning) strength = params.strength[gate];
    return Step::factors_of(params, vectors, log_decay, strength);
  }

  __device__ static void run_token(const Params& params, const Place& place, TileToken at,
                                   const TokenInputs& inputs, Rows& rows) {
    const auto [tile, token] = at;
    const auto& [vectors, factors, values] = inputs;
    float own[Shape::kRows], reads[Shape::kRows];
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) own[r] = values[lane_row() + r * Shape::kStep];
    Step::update(rows, vectors, factors, own);
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) reads[r] = rows[r].partial_dot(vectors.out);
    sum_over_lanes<Shape>(reads);
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      reads[r] = Step::result_of(params, place.head, factors.out, own[r], reads[r]);
    }
    store_results(params, place, tile, token, reads);
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) rows[r].template round<Shape::kState>();
    if (params.plan.snapshot_slots == nullptr) return;
    const int32_t slot = params.plan.snapshot_slots[token];
    if (slot >= 0) stream_rows(rows, state_at(params, place, tile, slot));
  }

  // Takes a tile through all tokens of its request.
  __device__ static void run_tile(const Params& params, const Place& place, int32_t tile,
                                  const TokenFactors& first, Memory& shared) {
    Rows rows;
    if (place.span.from_zero) {
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) rows[r].clear();
    } else {
      shared.tiles[tile].wait(0);
      load_rows(rows, shared.state[tile]);
    }
    const int32_t row = tile * Shape::kTileRows;
    Vectors vectors;
    load_vectors(vectors, shared.in, shared.out, shared.log_decays);
    run_token(params, place, {tile, place.span.begin}, {vectors, first, shared.values + row}, rows);
#pragma unroll 1
    for (int32_t token = place.span.begin + 1; token < place.span.end; ++token) {
      const float* const from = vectors_at(params, place, token);
      load_vectors(vectors, from + params.in_at, from + params.out_at,
                   Step::column_decays(params, gate_of(params, place, token)));
      const TokenFactors factors = load_factors(params, place, token, vectors);
      run_token(params, place, {tile, token},
                {vectors, factors, values_at(params, place, token) + row}, rows);
    }
    stream_rows(rows, state_at(params, place, tile, place.span.slot));
  }

  __device__ static void clear_results(const Params& params, const Place& place) {
    if (place.span.in_chunks) return;
    const float zeros[Shape::kRows] = {};
    for (int32_t token = place.span.begin; token < place.span.end; ++token) {
      for (int32_t i = 0; i < place.tiles; ++i) store_results(params, place, i, token, zeros);
    }
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(128) char dynamic_shared[];
    auto& shared = *reinterpret_cast<Memory*>(dynamic_shared);
    const bool is_first_lane = threadIdx.x == 0;
    if (is_first_lane) {
      shared.inputs.init(2);
#pragma unroll
      for (int i = 0; i < Shape::kTiles; ++i) shared.tiles[i].init(1);
      fence_barrier_init();
    }
    __syncwarp();
    if (!params.state_is_ready) wait_for_previous_kernel();
    const Place place(params);
    if (is_first_lane && place.runs()) start_state(params, place, shared);
    if (params.state_is_ready) wait_for_previous_kernel();
    allow_next_kernel();
    if (!place.runs()) return clear_results(params, place);
    if (is_first_lane) start_inputs(params, place, shared);
    shared.inputs.wait(0);
    const TokenFactors factors = first_factors(params, shared);
#pragma unroll 1
    for (int32_t i = 0; i < place.tiles; ++i) run_tile(params, place, i, factors, shared);
  }
};

template <Recurrence kKind, int kColumns, Type kState>
using Config = RecurrentDecode<DecodeShape<kKind, kColumns, kState>>;

}  // namespace fovea::kernels::cuda
