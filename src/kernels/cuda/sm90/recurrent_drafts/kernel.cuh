// SPDX-License-Identifier: Apache-2.0
// Passes of a few tokens a request on Hopper, drafts that slots keep among them. A pass reads a
// state once and writes it once, with several steps between: the state of a block's next rows is on
// its way behind the steps of these.
//
//   unit    rows of one head's state of one request; blocks walk over units
//   state   slot ──► shared memory ──► registers    the copy of the next one begins here
//   tokens  kTile of them ──► shared memory         while those before them are computed
//           steps in registers                      the bits of portable/recurrence; replayed ones
//                                                   need no sums
//   state   registers ──► slot                      before the drafts of the pass
#pragma once

#include "kernels/cuda/sm90/recurrent_drafts/keep.cuh"

namespace fovea::kernels::cuda {

template <class Shape>
struct RecurrentDrafts : KeepDrafts<Shape> {
  using Params = RecurrenceParams;
  using Memory = DraftsMemory<Shape>;
  using Unit = DraftsUnit<Shape>;
  using Staged = StagedTokens<Shape>;
  using KeepDrafts<Shape>::lane_column;
  using Values = LaneValues<Shape>;
  using Step = RecurrenceStep<Shape>;
  using Vectors = TokenVectors<Shape>;
  using Rows = Values[Shape::kRows];
  static constexpr int kThreads = Shape::kWarps * 32;
  static constexpr int kBlocksPerSm = Shape::kBlocksPerSm;
  static constexpr KernelTraits kTraits = {kThreads, sizeof(Memory), Shape::kBlockRows, 0};
  // Eight lanes find the factors of a token.
  static_assert(Shape::kTile * Shape::kRowLanes <= kThreads);
  static_assert((sizeof(Memory) + 1024) * kBlocksPerSm <= kMaxSharedBytes + 1024);

  // A unit of a block.
  struct Work {
    Unit unit;
    int32_t index, number;  // among all units, and among the block's
  };
  using TokenRange = StagedRange;
  // The memory of a block, and its places from unit to unit.
  struct Stages {
    Memory& shared;
    int tokens = 0;      // place of the next tokens
    uint32_t phase = 0;  // parity of the next state
  };

  __device__ static int32_t units_of(const Params& params) {
    return params.requests * params.heads * params.tiles;
  }
  // Returns the first of a thread's rows in a unit; the others follow at intervals of kStep.
  __device__ static int lane_row() {
    const auto thread = static_cast<int>(threadIdx.x);
    return thread / 32 * (Shape::kStep * Shape::kRows) + thread % 32 / Shape::kRowLanes;
  }
  // Returns the row whose sum and value the thread has.
  __device__ static int own_row() {
    return lane_row() + static_cast<int>(threadIdx.x) % Shape::kRows * Shape::kStep;
  }

  // Calls body(row, index of its first value of the thread in a unit).
  template <typename Body>
  __device__ static void for_rows(Rows& rows, Body body) {
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      body(rows[r], (lane_row() + r * Shape::kStep) * Shape::kColumns + lane_column());
    }
  }
  __device__ static void load_rows(Rows& rows, const void* from) {
    for_rows(rows, [&](Values& row, int at) {
      row.template load_as<Shape::kState>(static_cast<const unsigned char*>(from) +
                                          at * type_bytes(Shape::kState));
    });
  }
  __device__ static void clear_rows(Rows& rows) {
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) rows[r].clear();
  }
  __device__ static unsigned char* slot_at(const Params& params, const Unit& unit, int32_t slot) {
    return static_cast<unsigned char*>(params.state) +
           unit.state_at(params, slot) * type_bytes(Shape::kState);
  }
  __device__ static void store_rows(const Params& params, const Unit& unit, int32_t slot,
                                    Rows& rows) {
    unsigned char* const to = slot_at(params, unit, slot);
    for_rows(rows, [&](Values& row, int at) {
      row.template stream_as<Shape::kState>(to + at * type_bytes(Shape::kState));
    });
  }

  // Starts the copy of the plan of a unit's request.
  __device__ static void start_plan(const Params& params, int32_t index, RequestTokens& to) {
    if (threadIdx.x != 0) return;
    const int32_t request = Unit::request_of(params, index);
    copy_async(&to.span, params.plan.spans + request, sizeof(StateSpan));
    if (params.plan.drafts) copy_async(&to.drafts, params.plan.drafts + request, sizeof(DraftSpan));
  }
  __device__ static void start_state(const Params& params, const Unit& unit, Memory& shared) {
    if (threadIdx.x != 0 || !unit.has_state()) return;
    shared.full.arrive_expecting(sizeof(shared.state));
    load_bytes(shared.state, slot_at(params, unit, unit.tokens.span.slot), sizeof(shared.state),
               shared.full);
  }
  // Starts the copies of up to kTile tokens from `first` on. A warp takes a token.
  __device__ static void start_tokens(const Params& params, const Unit& unit, int32_t first,
                                      Staged& to) {
    if (!unit.runs()) return;
    static_assert(Shape::kColumns == 32 * 4);
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t count = min(Shape::kTile, unit.tokens.span.end - first);
#pragma unroll 1
    for (int32_t t = static_cast<int32_t>(threadIdx.x) / 32; t < count; t += Shape::kWarps) {
      const TokenPlace<Shape> from(params, unit, unit.tokens, unit.row, first + t);
      copy_async(&to.in[t][lane * 4], from.in + lane * 4, 16);
      copy_async(&to.out[t][lane * 4], from.out + lane * 4, 16);
      if constexpr (Staged::kHasDecays) {
        copy_async(&to.decays[t][lane * 4], from.log_decay + lane * 4, 16);
      }
      if (lane * 4 < Shape::kBlockRows) {
        copy_async(&to.values[t][lane * 4], from.values + lane * 4, 16);
      }
      if (lane != 31) continue;
      if constexpr (!Staged::kHasDecays) copy_word_async(&to.log_decay[t], from.log_decay, 4);
      if constexpr (Shape::kKind != lightning) copy_word_async(&to.strength[t], from.strength, 4);
    }
  }

  __device__ static void load_vectors(const Staged& staged, int32_t t, Vectors& vectors) {
    vectors.in.load(staged.in[t] + lane_column());
    if constexpr (Staged::kHasDecays) vectors.decays.load(staged.decays[t] + lane_column());
  }

  // Finds the factors of staged tokens, replaces log decays of columns by decays, and keeps drafts.
  // The first warps find factors, the others keep values.
  __device__ static void prepare(const Params& params, const Unit& unit, TokenRange range,
                                 Memory& shared, Staged& staged) {
    const int32_t first = range.first, count = range.count;
    const int32_t t = static_cast<int32_t>(threadIdx.x) / Shape::kRowLanes;
    if (!Step::kHasDeltaRule && unit.tokens.drafts.drafts > 0 && params.keeps_mixed) {
      KeepDrafts<Shape>::keep_values(params, unit, range, staged);
    }
    if (threadIdx.x / 32 * Shape::kStep >= count) return;
    const int32_t own = min(t, count - 1);
    Vectors vectors;
    load_vectors(staged, own, vectors);
    vectors.out.load(staged.out[own] + lane_column());
    const float log_decay = Staged::kHasDecays ? 0.0f : staged.log_decay[own];
    const float strength = Shape::kKind == lightning ? 1.0f : staged.strength[own];
    const bool is_draft = unit.tokens.drafts.drafts > 0 && first + t >= unit.tokens.first_draft();
    if (t < count && is_draft) {
      KeepDrafts<Shape>::keep_vectors(params, unit, first + t, vectors, log_decay, strength);
    }
    vectors.exponentiate();
    const TokenFactors factors = Step::factors_of(params, vectors, log_decay, strength);
    if (t >= count) return;
    if constexpr (Staged::kHasDecays) {
      vectors.decays.template store_as<f32>(staged.decays[t] + lane_column());
    }
    if (lane_column() == 0) shared.factors[t] = factors;
  }

  // Stores the state where a snapshot is asked for, and in its slot before drafts. -1: not.
  __device__ static void store_in(const Params& params, const Unit& unit, int32_t slot,
                                  int32_t snapshot, Rows& rows) {
#pragma unroll 1
    while (slot >= 0 || snapshot >= 0) {
      if (slot >= 0) store_rows(params, unit, slot, rows);
      slot = snapshot;
      snapshot = -1;
    }
  }

  // Returns where the thread's result of a token goes.
  __device__ static float* result_at(const Params& params, const Unit& unit, int32_t token) {
    return params.result + token * params.result_stride +
           static_cast<int64_t>(unit.head) * params.rows + unit.row + own_row();
  }
  // True for lanes below kRows of a row's eight.
  __device__ static bool has_change() {
    return static_cast<int>(threadIdx.x % Shape::kRowLanes) < Shape::kRows;
  }
  // True for lanes from kRows to 2 * kRows - 1 of a row's eight.
  __device__ static bool has_result() {
    return static_cast<int>(threadIdx.x % Shape::kRowLanes) / Shape::kRows == 1;
  }

  // Takes the replayed tokens into the state.
  __device__ static void replay_tokens(const Params& params, const Unit& unit, TokenRange range,
                                       const Memory& shared, const Staged& staged, Rows& rows) {
    const StateSpan& span = unit.tokens.span;
    const int32_t first = range.first, count = range.count, replayed = range.replayed;
#pragma unroll 1
    for (int32_t t = 0; t < replayed; ++t) {
      Vectors vectors;
      load_vectors(staged, t, vectors);
      float kept[Shape::kRows];
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) {
        kept[r] = staged.values[t][lane_row() + r * Shape::kStep];
      }
      Step::replay(rows, vectors, shared.factors[t], kept);
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) rows[r].template round<Shape::kState>();
    }
    // Without a token of the pass before its drafts, the state stays, unless it is new.
    const bool is_new = replayed > 0 || (span.from_zero && first == span.begin);
    if (count > 0 && is_new && first + replayed == unit.tokens.first_draft()) {
      store_rows(params, unit, span.slot, rows);
    }
  }

  // Computes the tokens behind the replayed ones. The sums of a token's result are exchanged
  // together with those of the next token's update, whose vectors arrive from shared memory
  // meanwhile. Rows of 16 bits leave no registers for that, because they are rounded after each
  // token.
  __device__ static void run_tokens(const Params& params, const Unit& unit, TokenRange range,
                                    const Memory& shared, Staged& staged, Rows& rows) {
    const int32_t first = range.first, count = range.count, begin = range.replayed;
    const RequestTokens& tokens = unit.tokens;
    const int32_t last = tokens.first_draft() - 1 - first;  // the state takes it in
    const int32_t* const snapshots = params.plan.snapshot_slots;
    float* result = result_at(params, unit, first + begin - 1);  // the place of the token before
    float reads[Shape::kRows] = {}, out_factor = 0, value = 0;
    constexpr bool kReadsAhead = Shape::kState == f32;
    Vectors vectors;
    TokenFactors factors;
    float next_value;
    const auto load_token = [&](int32_t t) {
      load_vectors(staged, t, vectors);
      factors = shared.factors[t];
      next_value = staged.values[t][own_row()];
    };
    const auto load_out = [&](int32_t t) { vectors.out.load(staged.out[t] + lane_column()); };
    if constexpr (kReadsAhead) load_token(min(begin, Shape::kTile - 1));
#pragma unroll 1
    for (int32_t t = begin; t < count; ++t, result += params.result_stride) {
      if constexpr (!kReadsAhead) load_token(t);
      const float value_before = value;
      value = next_value;
      if constexpr (kReadsAhead) load_out(t);
      const auto own = Step::update_by_own(rows, vectors, factors, value, reads);
      if (t > begin && has_result()) {
        *result = Step::result_of(params, unit.head, out_factor, value_before, own.read);
      }
      if (Step::kHasDeltaRule && has_change()) staged.values[t][own_row()] = own.change;
      out_factor = factors.out;
      if constexpr (kReadsAhead) load_token(min(t + 1, count - 1));
      if constexpr (!kReadsAhead) load_out(t);
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) reads[r] = rows[r].partial_dot(vectors.out);
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) rows[r].template round<Shape::kState>();
      const int32_t snapshot = snapshots ? snapshots[first + t] : -1;
      if (t == last || snapshot >= 0) {
        store_in(params, unit, t == last ? tokens.span.slot : -1, snapshot, rows);
      }
    }
    if (begin >= count) return;  // before the loop it costs registers
    const float read = own_sum_over_lanes<Shape>(reads);
    if (has_result()) *result = Step::result_of(params, unit.head, out_factor, value, read);
  }

  // Starts the copies for the block's next unit, whose plan has arrived.
  __device__ static void start_next(const Params& params, const Work& work, Stages& stages) {
    const auto step = static_cast<int32_t>(gridDim.x);
    const int32_t next = work.index + step, units = units_of(params);
    if (next >= units) return;
    RequestTokens* const plans = stages.shared.plans;
    const Unit unit(params, next, plans[(work.number + 1) % 2]);
    start_state(params, unit, stages.shared);
    start_tokens(params, unit, unit.tokens.begin(), stages.shared.tokens[stages.tokens]);
    if (next + step < units) start_plan(params, next + step, plans[work.number % 2]);
  }

  // Takes the state of a unit from shared memory.
  __device__ static void take_state(const Unit& unit, Stages& stages, Rows& rows) {
    if (!unit.has_state()) return clear_rows(rows);
    stages.shared.full.wait(stages.phase);
    stages.phase ^= 1;
    load_rows(rows, stages.shared.state);
  }

  // Computes a unit whose first tokens are on their way.
  __device__ static void run_unit(const Params& params, const Work& work, Stages& stages,
                                  Rows& rows) {
    Memory& shared = stages.shared;
    const Unit& unit = work.unit;
    const RequestTokens& tokens = unit.tokens;
    const int32_t end = unit.runs() ? tokens.span.end : tokens.begin();
    int32_t first = tokens.begin();
    do {
      wait_copies<0>();
      __syncthreads();
      if (first == tokens.begin() && work.number > 0) take_state(unit, stages, rows);
      Staged& staged = shared.tokens[stages.tokens];
      const int32_t count = min(Shape::kTile, end - first);
      const int32_t replayed = min(max(tokens.span.begin - first, 0), count);
      const TokenRange range = {first, count, replayed};
      prepare(params, unit, range, shared, staged);
      __syncthreads();
      stages.tokens ^= 1;
      if (first + Shape::kTile < end) {
        start_tokens(params, unit, first + Shape::kTile, shared.tokens[stages.tokens]);
      } else {
        start_next(params, work, stages);
      }
      commit_copies();
      replay_tokens(params, unit, range, shared, staged, rows);
      run_tokens(params, unit, range, shared, staged, rows);
      if (Step::kHasDeltaRule && tokens.drafts.drafts > 0) {
        KeepDrafts<Shape>::keep_changes(params, unit, range, staged);
      }
      first += Shape::kTile;
    } while (first < end);
    if (!unit.runs()) clear_results(params, unit);
  }

  __device__ static void clear_results(const Params& params, const Unit& unit) {
    const StateSpan& span = unit.tokens.span;
    if (span.in_chunks || !has_result()) return;
    for (int32_t token = span.begin; token < span.end; ++token) {
      *result_at(params, unit, token) = 0;
    }
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(128) char dynamic_shared[];
    auto& shared = *reinterpret_cast<Memory*>(dynamic_shared);
    if (threadIdx.x == 0) {
      shared.full.init(1);
      fence_barrier_init();
      if (!params.plan.drafts) shared.plans[0].drafts = shared.plans[1].drafts = {};
    }
    if (!params.state_is_ready) wait_for_previous_kernel();
    const int32_t units = units_of(params);
    const auto step = static_cast<int32_t>(gridDim.x);
    auto index = static_cast<int32_t>(blockIdx.x);
    const int32_t request = Unit::request_of(params, index);
    RequestTokens plan = {params.plan.spans[request]};
    if (params.plan.drafts) plan.drafts = params.plan.drafts[request];
    // The first state takes the shortest way.
    Rows rows;
    const Unit unit(params, index, plan);
    if (unit.has_state()) {
      load_rows(rows, slot_at(params, unit, unit.tokens.span.slot));
    } else {
      clear_rows(rows);
    }
    if (params.state_is_ready) wait_for_previous_kernel();
    allow_next_kernel();
    if (index + step < units) start_plan(params, index + step, shared.plans[1]);
    start_tokens(params, unit, unit.tokens.begin(), shared.tokens[0]);
    commit_copies();
    Stages stages = {shared};
    run_unit(params, {unit, index, 0}, stages, rows);
#pragma unroll 1
    for (int32_t number = 1; (index += step) < units; ++number) {
      const Unit next(params, index, shared.plans[number % 2]);
      run_unit(params, {next, index, number}, stages, rows);
    }
  }
};

template <Recurrence kKind, int kColumns, Type kState, int kRows>
using Config = RecurrentDrafts<DraftsShape<kKind, kColumns, kState, kRows>>;

}  // namespace fovea::kernels::cuda
