// SPDX-License-Identifier: Apache-2.0
// Passes of a few tokens a request on Hopper over slots that keep drafts, by products of tensor
// cores: what a state recalls and reads for four tokens is one product with their vectors, and so
// is what eight tokens change in it. The bits are not those of portable/recurrence.
//
//   grid: x = (head, rows of a block), y = request; a warp has 16 rows, then 16 others
//
//   state    slot ──► registers
//   tokens   replayed drafts, then those of the pass ──► shared memory
//   prepare  products of their vectors, with the decays between
//   group    four new tokens: S k and S q over the slot's state, which no token has changed; then
//            what earlier tokens add to both, one after the other
//   update   registers + changes k^T ──► slot, of the tokens before the pass's drafts; the warp's
//            next rows arrive in the registers of those that are stored
//
// Values are not moved between the products: lane t of four has columns 2 t and 2 t + 1 of a step,
// as a product of 16 rows has them in its result (C). Those of eight rows are an operand (B), whose
// columns t and t + 4 stand for the same two. A number is the sum of two of tf32, of which states
// of 16 bits need one.
#pragma once

#include "kernels/cuda/sm90/draft_products/prepare.cuh"

namespace fovea::kernels::cuda {

template <class Shape>
struct DraftProducts : PrepareTokens<Shape> {
  using Params = RecurrenceParams;
  using Memory = ProductsMemory<Shape>;
  using Unit = ProductsUnit<Shape>;
  using Step = RecurrenceStep<Shape>;
  using LoadTokens<Shape>::lane;
  using LoadTokens<Shape>::whole_warp;
  using LoadTokens<Shape>::eighth;
  using LoadTokens<Shape>::fourth;
  static constexpr int kBlocksPerSm = Shape::kBlocksPerSm;
  static constexpr KernelTraits kTraits = {Shape::kThreads, sizeof(Memory), Shape::kBlockRows, 0};
  static_assert((sizeof(Memory) + 1024) * kBlocksPerSm <= kMaxSharedBytes + 1024);

  // Two columns of a row in a step, then of the row 8 behind it.
  struct Tile {
    float c[4];
  };
  // The lane's parts of two rows, 8 apart, as they are in memory.
  struct alignas(16) Part {
    uint32_t words[Shape::kPartSteps];
  };
  struct Rows {
    Part at[Shape::kParts][2];
  };
  // A value of a vector and four rows of the state: 2 t, 2 t + 1 and those 8 behind them.
  struct Sums {
    float of[4];
  };
  // The changes of a token and of the one four places behind it in two rows, 8 apart.
  struct Changes {
    Tf32Parts near[2], far[2];  // by row
  };

  // Returns the row of a value of Sums behind the first one.
  __device__ static int32_t row_of(int i) { return i / 2 * 8 + fourth() * 2 + i % 2; }

  __device__ static unsigned char* state_at(const Params& params, const Unit& unit, int32_t first) {
    const int64_t row = unit.head * params.rows + unit.row + first + eighth();
    const int64_t index = unit.tokens.span.slot * params.state_slot_stride + row * Shape::kColumns;
    return static_cast<unsigned char*>(params.state) + index * type_bytes(Shape::kState) +
           fourth() * sizeof(Part);
  }
  // Calls body(part, its place in memory) for both rows.
  template <typename Body>
  __device__ static void for_part(Rows& rows, unsigned char* state, int part, Body body) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = half * 8 * Shape::kColumns * type_bytes(Shape::kState);
      body(rows.at[part][half], reinterpret_cast<Part*>(state + at) + 4 * part);
    }
  }
  template <typename Body>
  __device__ static void for_parts(Rows& rows, unsigned char* state, Body body) {
#pragma unroll
    for (int i = 0; i < Shape::kParts; ++i) for_part(rows, state, i, body);
  }
  __device__ static void load_part(Part& part, const Part* from) { part = *from; }
  __device__ static void store_part(const Part& part, Part* to) {
    __stcs(reinterpret_cast<uint4*>(to),
           uint4{part.words[0], part.words[1], part.words[2], part.words[3]});
  }
  // Returns the place of the state's rows from `row` on, null if the unit has none there.
  __device__ static unsigned char* existing_at(const Params& params, const Unit& unit,
                                               int32_t row) {
    return unit.has_state() && row < unit.rows ? state_at(params, unit, row) : nullptr;
  }
  // Loads rows from there, or zeros.
  __device__ static void load_state(unsigned char* state, Rows& rows) {
    if (state != nullptr) return for_parts(rows, state, load_part);
    for_parts(rows, nullptr, [](Part& part, const Part*) { part = {}; });
  }

  __device__ static Tile tile_of(const Rows& rows, int step) {
    Tile tile;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = rows.at[step / Shape::kPartSteps][half].words[step % Shape::kPartSteps];
      const float2 two = unpack<Shape::kState>(word);
      tile.c[2 * half] = two.x;
      tile.c[2 * half + 1] = two.y;
    }
    return tile;
  }
  __device__ static void set_tile(Rows& rows, int step, const Tile& tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t& word = rows.at[step / Shape::kPartSteps][half].words[step % Shape::kPartSteps];
      word = pack<Shape::kState>(tile.c[2 * half], tile.c[2 * half + 1]);
    }
  }

  // Adds products with vectors, whose results are below each other with those of their rests.
  __device__ static void add_products(const float (&products)[4], float* sums) {
    sums[0] += products[0] + products[2];
    sums[1] += products[1] + products[3];
  }

  // Multiplies the state by the vectors of a group.
  __device__ static Sums multiply_state(const Rows& rows, const Tf32Rows (*vectors)[32]) {
    float products[2][4] = {};  // by eight rows
#pragma unroll
    for (int i = 0; i < Shape::kSteps; ++i) {
      const Tile tile = tile_of(rows, i);
      const Tf32Rows vector = vectors[i][lane()];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply_add_tf32(products[half], vector.at, __float_as_uint(tile.c[2 * half]),
                          __float_as_uint(tile.c[2 * half + 1]));
      }
    }
    Sums sums = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) add_products(products[half], sums.of + 2 * half);
    return sums;
  }

  // Returns what tokens from a place on change, zeros for those that have no bit in `places`.
  __device__ static Changes changes_of(const Memory& shared, int32_t row, int32_t first,
                                       uint32_t places, bool is_update) {
    const auto change_of = [&](int32_t place, int half) {
      float change = shared.values[place][row + eighth() + half * 8];
      if constexpr (Shape::kKind == mamba2) change *= shared.strength[place];
      if (!Shape::kHasDecays && is_update) change *= shared.rest[place];
      return parts_of(places >> place & 1 ? change : 0.0f);
    };
    Changes changes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      changes.near[half] = change_of(first + fourth(), half);
      changes.far[half] = change_of(first + fourth() + 4, half);
    }
    return changes;
  }

  // Adds what earlier tokens change to the sums of a group.
  __device__ static void add_earlier(const TokenPlaces& places, int32_t group, int32_t row,
                                     const Memory& shared, Sums& sums) {
    const int32_t begin = places.first_new + group * Shape::kGroup;
    const uint32_t earlier = places.before(begin);
    const auto pair_of = [&](int32_t place) {
      const float pair = shared.pairs[place][group * Memory::kVectors + eighth()];
      return earlier >> place & 1 ? pair : 0.0f;
    };
#pragma unroll 1
    for (int32_t first = 0; first < begin; first += 8) {
      const Changes changes = changes_of(shared, row, first, earlier, false);
      const int32_t place = first + fourth();
      const Tf32Rows pairs = rows_of(pair_of(place), pair_of(place + 4));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Tf32Parts near = changes.near[half], far = changes.far[half];
        float products[4] = {};
        multiply_add_tf32(products, pairs.at, near.low, far.low);
        multiply_add_tf32(products, pairs.at, near.high, far.high);
        add_products(products, sums.of + 2 * half);
      }
    }
  }

  // Takes the tokens of a group one after the other. sums: of the lane's vector over the state and
  // earlier groups, which the group's own tokens add to. Returns their changes, of the lane's
  // token.
  __device__ static Sums solve(const TokenPlaces& places, int32_t group, int32_t row,
                               const Memory& shared, Sums& sums) {
    const int32_t begin = places.first_new + group * Shape::kGroup;
    const int32_t token = eighth() % Shape::kGroup, place = begin + token;
    const bool is_recall = eighth() < Shape::kGroup;
    const float factor = Shape::kHasDeltaRule ? shared.in_factor[place] : 1.0f;
    const float strength = Shape::kKind == lightning ? 1.0f : shared.strength[place] * factor;
    Sums changes;
    const auto find_change = [&](int i) {
      const float lost = Shape::kHasDeltaRule ? factor * sums.of[i] : 0.0f;
      changes.of[i] = strength * (shared.values[place][row + row_of(i)] - lost);
    };
#pragma unroll
    for (int j = 0; j < Shape::kGroup; ++j) {
      const float pair = shared.pairs[begin + j][group * Memory::kVectors + eighth()];
      const bool adds = is_recall ? Shape::kHasDeltaRule && token > j : token >= j;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (Shape::kHasDeltaRule || j == 0) find_change(i);
        const float change = __shfl_sync(~0u, changes.of[i], j * 4 + fourth());
        if (adds) sums.of[i] = fmaf(change, pair, sums.of[i]);
      }
    }
    // The last token's change is found already, and others have not changed since.
    return changes;
  }

  __device__ static void store_rows(float* to, const float (&of)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(to + half * 8) = {of[2 * half], of[2 * half + 1]};
    }
  }
  // Computes the tokens of a group over the rows from `row` on.
  __device__ static void run_group(const Params& params, int32_t group, int32_t row,
                                   const Rows& rows, Memory& shared) {
    const Unit& unit = shared.unit;
    const TokenPlaces& places = shared.places;
    Sums sums = multiply_state(rows, shared.vectors[group]);
    const int32_t index = group * Shape::kGroup + eighth() % Shape::kGroup;
    const int32_t place = places.first_new + index;
    if constexpr (!Shape::kHasDecays) {
      const float reach = shared.reach[place];
#pragma unroll
      for (float& sum : sums.of) sum *= reach;
    }
    add_earlier(places, group, row, shared, sums);
    const Sums changes = solve(places, group, row, shared, sums);
    __syncwarp();  // all lanes have read the values
    if (place >= places.end) return;
    const int32_t token = unit.tokens.span.begin + index;
    const int32_t at = unit.head * params.rows + unit.row + row + row_of(0);
    if (eighth() >= Shape::kGroup) {
      const float factor = shared.out_factor[place];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = Shape::kKind == mamba2 ? shared.values[place][row + row_of(i)] : 0.0f;
        sums.of[i] = Step::result_of(params, unit.head, factor, value, sums.of[i]);
      }
      store_rows(params.result + token * params.result_stride + at, sums.of);
    } else if (Shape::kHasDeltaRule) {
      store_rows(&shared.values[place][row + row_of(0)], changes.of);
      if (token >= unit.tokens.first_draft()) {
        store_rows(unit.tokens.kept_row(params.kept, token) + params.kept.changes_at + at,
                   changes.of);
      }
    }
  }

  // Takes the tokens at eight places into the state, as far as it takes them, and stores it. Loads
  // the rows at `next` instead, unless that is null.
  __device__ static void update(int32_t index, int32_t row, const Memory& shared, Rows& rows,
                                unsigned char* state, unsigned char* next) {
    const TokenPlaces& places = shared.places;
    const Changes changes = changes_of(shared, row, index * 8, places.before(places.taken), true);
    const uint32_t high[4] = {changes.near[0].high, changes.near[1].high, changes.far[0].high,
                              changes.far[1].high};
    const uint32_t low[4] = {changes.near[0].low, changes.near[1].low, changes.far[0].low,
                             changes.far[1].low};
    const uint32_t keys_at = shared_address(&shared.keys[index][0][lane()]);
    const bool decays = index == 0 && places.taken > 0;
    float2 by = {1, 1};
    const float* column_decays = nullptr;
    if constexpr (Shape::kHasDecays) {
      column_decays =
          (decays ? shared.columns.state : shared.columns.none) + Shape::column_of(0, fourth());
    } else if (decays) {
      by.x = by.y = shared.reach[places.taken - 1];
    }
#pragma unroll
    for (int i = 0; i < Shape::kSteps; ++i) {
      Tile tile = tile_of(rows, i);
      if constexpr (Shape::kHasDecays) {
        by = *reinterpret_cast<const float2*>(column_decays + Shape::column_of(i, 0));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) tile.c[j] *= j % 2 ? by.y : by.x;
      uint32_t keys[4];
      load_here(keys, keys_at + i * sizeof(shared.keys[0][0]));
      multiply_add_tf32(tile.c, low, keys[0], keys[1]);
      multiply_add_tf32(tile.c, high, keys[2], keys[3]);
      multiply_add_tf32(tile.c, high, keys[0], keys[1]);
      set_tile(rows, i, tile);
      if (i % Shape::kPartSteps == Shape::kPartSteps - 1) {
        for_part(rows, state, i / Shape::kPartSteps, store_part);
        if (next != nullptr) for_part(rows, next, i / Shape::kPartSteps, load_part);
      }
    }
  }

  __device__ static void clear_results(const Params& params, const Unit& unit) {
    const StateSpan& span = unit.tokens.span;
    if (span.in_chunks || static_cast<int32_t>(threadIdx.x) >= unit.rows) return;
    float* const result = params.result + unit.head * params.rows + unit.row + threadIdx.x;
    for (int32_t token = span.begin; token < span.end; ++token) {
      result[token * params.result_stride] = 0;
    }
  }

  // Brings the tokens and what products need of them.
  __device__ static void prepare_tokens(const Params& params, const Unit& unit, Memory& shared) {
    const TokenPlaces places = unit.places();
    if (threadIdx.x == 0) {
      shared.unit = unit;
      shared.places = places;
    }
    DraftProducts::start(params, unit, places, shared);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    DraftProducts::keep_drafts(params, unit, places, shared);
    if constexpr (Shape::kHasDecays) {
      DraftProducts::exponentiate(places, shared);  // the warp's own, which it has kept
      __syncthreads();
    }
    DraftProducts::prepare(params, places, shared);
    if constexpr (Shape::kHasDecays) __syncthreads();
    DraftProducts::write_keys(places, shared);
    __syncthreads();
  }

  // Takes the pass's tokens over a tile, and stores the state that its slot has after it. Then
  // `rows` are those at `next`.
  __device__ static void multiply(const Params& params, int32_t row, Memory& shared, Rows& rows,
                                  unsigned char* next) {
    const TokenPlaces& places = shared.places;
#pragma unroll 1
    for (int32_t i = 0; places.first_new + i * Shape::kGroup < places.end; ++i) {
      run_group(params, i, row, rows, shared);
      __syncwarp();  // other lanes read its changes
    }
    // Without a token before the pass's drafts, the state stays, unless it is new.
    if (places.updates == 0) return load_state(next, rows);
#pragma unroll 1
    for (int32_t i = 1; i <= places.updates; ++i) {
      unsigned char* const state = state_at(params, shared.unit, row);
      update(i - 1, row, shared, rows, state, i < places.updates ? state : next);
    }
    if (next == nullptr) load_state(next, rows);
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(128) char dynamic_shared[];
    auto& shared = *reinterpret_cast<Memory*>(dynamic_shared);
    if (!params.state_is_ready) wait_for_previous_kernel();
    const Unit unit(params);
    const int32_t first = whole_warp() * 16;
    Rows rows;
    load_state(existing_at(params, unit, first), rows);
    if (params.state_is_ready) wait_for_previous_kernel();
    allow_next_kernel();
    if (!unit.runs()) return clear_results(params, unit);
    prepare_tokens(params, unit, shared);
#pragma unroll 1
    for (int32_t row = first; row < shared.unit.rows; row += Shape::kTileRows) {
      unsigned char* next = nullptr;
      if constexpr (Shape::kTiles > 1) {
        next = existing_at(params, shared.unit, row + Shape::kTileRows);
      }
      multiply(params, row, shared, rows, next);
    }
  }
};

template <Recurrence kKind, int kColumns, Type kState>
using Config = DraftProducts<ProductsShape<kKind, kColumns, kState>>;

}  // namespace fovea::kernels::cuda
