// SPDX-License-Identifier: Apache-2.0
// Decode of linear layers on Hopper: portable/recurrence for passes with one token a request. A
// decode step is a copy of all states with a little arithmetic between, so warps are copy loops:
// each has a ring of stages of its own, through which the copy engine moves tiles of states, and
// waits for no other warp.
//
//   stage   state ──► shared memory      while the preceding kernel still runs
//           in, out of the first token
//           update in registers          the bits of portable/recurrence
//           shared memory ──► state      the stage is filled again once it has been read
#pragma once

#include "kernels/cuda/sm90/recurrent_decode/config.cuh"

namespace fovea::kernels::cuda {

template <class Shape>
struct RecurrentDecode {
  using Params = RecurrenceParams;
  using Stage = TileStage<Shape>;
  using Values = LaneValues<Shape>;
  using Step = RecurrenceStep<Shape>;
  using Vectors = TokenVectors<Shape>;
  using Rows = Values[Shape::kRows];
  static constexpr int kBlocksPerSm = Shape::kBlocksPerSm;
  static constexpr KernelTraits kTraits = {Shape::kWarps * 32, sizeof(DecodeMemory<Shape>),
                                           Shape::kTileRows, 0};
  // The gates of a tile are read while the one before it is computed: its stage is then filled.
  static_assert(Shape::kStages >= 3);
  static_assert(sizeof(DecodeMemory<Shape>) * Shape::kBlocksPerSm <= kMaxSharedBytes);

  // Gates and values of one token, loaded a tile ahead.
  struct TokenScalars {
    float log_decay, strength;
    float values[Shape::kRows];
  };

  __device__ static int lane_row() { return static_cast<int>(threadIdx.x % 32) / Shape::kRowLanes; }
  __device__ static int lane_column() {
    return static_cast<int>(threadIdx.x) % Shape::kRowLanes * 4;
  }

  // Returns the address of a tile in a slot.
  __device__ static unsigned char* state_at(const Params& params, const StateTile& tile,
                                            int32_t slot) {
    const int64_t index =
        slot * params.state_slot_stride +
        static_cast<int64_t>(tile.head * params.rows + tile.row) * Shape::kColumns;
    return static_cast<unsigned char*>(params.state) + index * type_bytes(Shape::kState);
  }
  __device__ static const float* vectors_at(const Params& params, const StateTile& tile,
                                            int32_t token) {
    return params.mixed + token * params.mixed_stride +
           short_quotient(tile.head, params.key_group) * Shape::kColumns;
  }

  // Starts the copy of a tile's state. Every lane calls this.
  __device__ static void start_state(const Params& params, Stage& stage, const StateTile& tile) {
    if (threadIdx.x % 32 != 0) return;
    stage.tile = tile;
    const bool has_state = tile.runs() && !tile.span.from_zero;
    constexpr int kVectorBytes =
        sizeof(stage.in) + sizeof(stage.out) + (Shape::kKind == kda ? sizeof(stage.log_decays) : 0);
    stage.full.arrive_expecting((has_state ? Shape::kTileBytes : 0) +
                                (tile.runs() ? kVectorBytes : 0));
    if (!has_state) return;
    load_bytes(stage.state, state_at(params, tile, tile.span.slot), Shape::kTileBytes, stage.full);
  }
  // Starts the copies of the vectors of its first token.
  __device__ static void start_vectors(const Params& params, Stage& stage, const StateTile& tile) {
    if (threadIdx.x % 32 != 0 || !tile.runs()) return;
    const float* const vectors = vectors_at(params, tile, tile.span.begin);
    load_bytes(stage.in, vectors + params.in_at, sizeof(stage.in), stage.full);
    load_bytes(stage.out, vectors + params.out_at, sizeof(stage.out), stage.full);
    if constexpr (Shape::kKind == kda) {
      load_bytes(stage.log_decays,
                 Step::column_decays(params, gate_of(params, tile, tile.span.begin)),
                 sizeof(stage.log_decays), stage.full);
    }
  }

  __device__ static int64_t gate_of(const Params& params, const StateTile& tile, int32_t token) {
    return static_cast<int64_t>(token) * params.heads + tile.head;
  }
  __device__ static TokenScalars load_scalars(const Params& params, const StateTile& tile,
                                              int32_t token) {
    TokenScalars scalars = {.strength = 1};
    if (!tile.runs()) return scalars;
    const int64_t gate = gate_of(params, tile, token);
    if constexpr (Shape::kKind != kda) {
      scalars.log_decay = *Step::log_decay_at(params, gate, tile.head);
    }
    if constexpr (Shape::kKind != lightning) scalars.strength = params.strength[gate];
    const float* const values = params.mixed + token * params.mixed_stride + params.values_at +
                                tile.head * params.rows + tile.row + lane_row();
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) scalars.values[r] = values[r * Shape::kStep];
    return scalars;
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
  __device__ static void store_rows(Rows& rows, unsigned char* tile) {
    for_rows(rows, [&](Values& row, int at) {
      row.template store_as<Shape::kState>(tile + at * type_bytes(Shape::kState));
    });
  }
  __device__ static void stream_rows(Rows& rows, unsigned char* tile) {
    for_rows(rows, [&](Values& row, int at) {
      row.template stream_as<Shape::kState>(tile + at * type_bytes(Shape::kState));
    });
  }

  __device__ static void store_results(const Params& params, const StateTile& tile, int32_t token,
                                       const float (&results)[Shape::kRows]) {
    if (lane_column() != 0) return;
    float* const to = params.result + token * params.result_stride +
                      static_cast<int64_t>(tile.head) * params.rows + tile.row + lane_row();
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) to[r * Shape::kStep] = results[r];
  }

  __device__ static void run_token(const Params& params, const StateTile& tile, int32_t token,
                                   const Vectors& vectors, const TokenScalars& scalars,
                                   Rows& rows) {
    const TokenFactors factors =
        Step::factors_of(params, vectors, scalars.log_decay, scalars.strength);
    Step::update(rows, vectors, factors, scalars.values);
    float reads[Shape::kRows];
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) reads[r] = rows[r].partial_dot(vectors.out);
    sum_over_lanes<Shape>(reads);
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      reads[r] = Step::result_of(params, tile.head, factors.out, scalars.values[r], reads[r]);
    }
    store_results(params, tile, token, reads);
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) rows[r].template round<Shape::kState>();
    if (params.plan.snapshot_slots == nullptr) return;
    const int32_t slot = params.plan.snapshot_slots[token];
    if (slot >= 0) stream_rows(rows, state_at(params, tile, slot));
  }

  // Takes the state in a stage through all tokens of its request.
  __device__ static void run_tile(const Params& params, Stage& stage, const TokenScalars& first) {
    const StateTile& tile = stage.tile;
    Rows rows;
    if (tile.span.from_zero) {
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) rows[r].clear();
    } else {
      load_rows(rows, stage.state);
    }
    Vectors vectors;
    load_vectors(vectors, stage.in, stage.out, stage.log_decays);
    run_token(params, tile, tile.span.begin, vectors, first, rows);
#pragma unroll 1
    for (int32_t token = tile.span.begin + 1; token < tile.span.end; ++token) {
      const float* const from = vectors_at(params, tile, token);
      load_vectors(vectors, from + params.in_at, from + params.out_at,
                   Step::column_decays(params, gate_of(params, tile, token)));
      run_token(params, tile, token, vectors, load_scalars(params, tile, token), rows);
    }
    store_rows(rows, stage.state);
  }

  __device__ static void clear_results(const Params& params, const StateTile& tile) {
    if (tile.span.in_chunks) return;
    const float zeros[Shape::kRows] = {};
    for (int32_t token = tile.span.begin; token < tile.span.end; ++token) {
      store_results(params, tile, token, zeros);
    }
  }

  __device__ static void finish_tile(const Params& params, Stage& stage,
                                     const TokenScalars& scalars) {
    if (!stage.tile.runs()) {
      clear_results(params, stage.tile);
      __syncwarp();
      return;
    }
    run_tile(params, stage, scalars);
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      store_bytes(state_at(params, stage.tile, stage.tile.span.slot), stage.state,
                  Shape::kTileBytes);
    }
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(128) char dynamic_shared[];
    auto& shared = *reinterpret_cast<DecodeMemory<Shape>*>(dynamic_shared);
    Stage* const stages = shared.stages[threadIdx.x / 32];
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < Shape::kStages; ++i) stages[i].full.init(1);
      fence_barrier_init();
    }
    __syncwarp();
    if (!params.state_is_ready) wait_for_previous_kernel();
    TileWalk<Shape> walk(params);
    const int32_t begun = min(Shape::kStages, walk.count);
#pragma unroll 1
    for (int32_t n = 0; n < begun; ++n) start_state(params, stages[n], walk.tile(params, n));
    if (params.state_is_ready) wait_for_previous_kernel();
    allow_next_kernel();
#pragma unroll 1
    for (int32_t n = 0; n < begun; ++n) start_vectors(params, stages[n], stages[n].tile);
    __syncwarp();
    walk_tiles(params, stages, walk);
  }

  __device__ static void walk_tiles(const Params& params, Stage* stages, TileWalk<Shape>& walk) {
    if (walk.count == 0) return;
    Ring<Shape::kStages> ring;
    TokenScalars scalars = load_scalars(params, stages[0].tile, stages[0].tile.span.begin);
#pragma unroll 1
    for (int32_t n = 0; n < walk.count; ++n) {
      Stage& stage = stages[ring.stage];
      const Ring<Shape::kStages> last = ring.previous();
      stage.full.wait(ring.phase);
      ring.advance();
      const TokenScalars own = scalars;
      if (n + 1 < walk.count) {
        const StateTile& next = stages[ring.stage].tile;
        scalars = load_scalars(params, next, next.span.begin);
      }
      finish_tile(params, stage, own);
      commit_stores();
      // The stage before this one is filled again, once its tile has left.
      const int32_t later = n - 1 + Shape::kStages;
      if (n == 0 || later >= walk.count) continue;
      wait_stores_read<1>();
      __syncwarp();
      const StateTile tile = walk.tile(params, later);
      start_state(params, stages[last.stage], tile);
      start_vectors(params, stages[last.stage], tile);
      __syncwarp();
    }
    wait_stores_read();
  }
};

template <Recurrence kKind, int kColumns, Type kState>
using Config = RecurrentDecode<DecodeShape<kKind, kColumns, kState>>;

}  // namespace fovea::kernels::cuda
