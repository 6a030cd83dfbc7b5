// SPDX-License-Identifier: Apache-2.0
// State of a consumer warpgroup: a row tile and its accumulators.
#pragma once

#include "kernels/cuda/common/conditional.cuh"
#include "kernels/cuda/common/score_mod.cuh"
#include "kernels/cuda/sm90/common/rows.cuh"
#include "kernels/cuda/sm90/common/slots.cuh"

namespace fovea::kernels::cuda {

// A slot of shared memory by its address there. For a pointer the compiler would not know the
// address space, and take two registers and slower loads.
class SharedSlot {
 public:
  __device__ __forceinline__ explicit SharedSlot(const TileSlot& slot)
      : address_(shared_address(&slot)) {}
  __device__ __forceinline__ const TileSlot* get() const {
    return static_cast<const TileSlot*>(shared_pointer(address_));
  }
  __device__ __forceinline__ const TileSlot& operator*() const { return *get(); }
  __device__ __forceinline__ const TileSlot* operator->() const { return get(); }

 private:
  uint32_t address_;
};

// A row tile as a consumer keeps it. The rest stays in its slot in shared memory.
struct RowTile {
  SharedSlot slot;
  int block_begin;
  int last_block;                 // with kOwnEnds, or of the present segment, as is block_begin
  int row_begin;                  // first key tile of the whole row tile
  int ends;                       // kIsCut, kOpens, kCloses
  Interval open;                  // keys that every row of the warpgroup sees
  int first_plain, plain_blocks;  // key tiles of is_plain()
  // Factors from products of the thread's rows to scores in units of log2: ScoreUnits.
  float factor[2];
  float inner[2];
  bool bounded;  // rows have the base 0 and never outgrow it
  // Slopes of ALiBi of the thread's rows, in units of log2, and the positions of their tokens.
  float slope[2];
  int position[2];
};

__device__ __forceinline__ RowTile uniform(RowTile tile) {
  tile.block_begin = uniform(tile.block_begin);
  tile.last_block = uniform(tile.last_block);
  tile.row_begin = uniform(tile.row_begin);
  tile.ends = uniform(tile.ends);
  return tile;
}

// How products become scores in units of log2: factor * product, or a transform of inner * product,
// times factor.
struct ScoreUnits {
  float inner, factor;
};
// `scale` leads from products to natural units, caps aside.
template <class Config>
__device__ __forceinline__ ScoreUnits score_units(const PrefillParams& params, float scale) {
  if (!Config::kTransforms || !modifies_scores(params.attention)) return {1, scale * kLog2E};
  const bool capped = Config::kCaps && params.attention.logit_cap > 0;
  return {scale * (capped ? params.cap.unit : kLog2E), 1};
}

// Capped scores of a row differ by less than bf16's range of powers, so that rows need neither a
// base nor a maximum. With this cap weights are within 2^-92.4 and 2^92.4: their sums stay finite
// for 2^34 keys, sums of values of 2^16 for 2^18.
constexpr float kMaxBoundedCap = 64;
template <class Config>
__device__ __forceinline__ bool is_bounded(const AttentionParams& attention) {
  return Config::kCaps && Config::kMath == bf16 && attention.logit_cap > 0 &&
         attention.logit_cap <= kMaxBoundedCap && !attention.alibi_slopes;
}

// Flags: the row tile is cut; this is the first, or the last, of the segments that the block takes
// of it. Segments go from the last to the first.
constexpr int kIsCut = 1, kOpens = 2, kCloses = 4;
template <class Config>
__device__ __forceinline__ bool opens(const RowTile& tile) {
  return !Config::kSegments || (tile.ends & kOpens);
}
template <class Config>
__device__ __forceinline__ bool closes(const RowTile& tile) {
  return !Config::kSegments || (tile.ends & kCloses);
}

// `units` hold for all rows; scale_rows() finds those of fp8 rows, which differ.
template <class Config>
__device__ __forceinline__ RowTile row_tile(const PrefillParams& params, SharedSlot slot,
                                            int consumer, const ScoreUnits& units) {
  const RowsView& rows = slot->rows[consumer];
  int last_block = 0;
  if constexpr (Config::kOwnEnds) {
    const int ahead = ((rows.columns - 1) & -Config::kKeys) /
                      Config::kKeys;  // 0, or negative if the rows see nothing of the last key tile
    last_block = uniform(slot->work.block_end + ahead) - 1;
  }
  const Interval open = {uniform(rows.open_begin), uniform(rows.open_end)};
  const int first_plain = (open.begin + Config::kKeys - 1) / Config::kKeys;
  return {slot,
          uniform(slot->work.block_begin),
          last_block,
          0,
          0,
          open,
          first_plain,
          max((open.end - 1) / Config::kKeys - first_plain, 0),
          {units.factor, units.factor},
          {units.inner, units.inner},
          is_bounded<Config>(params.attention)};
}

// Returns the first key tile of a row tile, which has its last keys.
template <class Config>
__device__ __forceinline__ int last_block(const RowTile& tile) {
  return Config::kSegments || Config::kOwnEnds ? tile.last_block
                                               : uniform(tile.slot->work.block_end) - 1;
}

template <class Config>
__device__ __forceinline__ int next_block(const PrefillParams& params, const RowTile& tile,
                                          int block) {
  const bool skips = Config::kSkips && params.attention.batch.mask.item_prefix_lens;
  return skips ? uniform(pass_hidden<Config>(*tile.slot, block - 1)) : block - 1;
}

// Returns the same for the work in a slot.
template <class Config>
__device__ __forceinline__ Interval row_keys(const PrefillParams& params, const TileSlot& slot,
                                             int consumer, int row) {
  const WorkTile& work = slot.work;
  const Interval keys = row_keys(params, work, slot_view<Config>(slot), consumer, row);
  if constexpr (Config::kParts)
    return {max(keys.begin, work.key_begin), min(keys.end, work.kv_len)};
  return keys;
}

// State of a cache with scales: the position of the next key tile's scales, and the unit of those
// of values.
template <class Config>
struct ScaleState {
  Ring<Config::kScaleSlots> scales;
  float v_unit;
};

template <class Config>
struct Accumulators {
  float out[Config::kHeadDimV / 2];
  float scores[Config::kKeys / 2];
  uint32_t weights[Config::kKeys * Config::kBytes / 8];
  uint32_t
      next_weights[Config::kAlone ? Config::kKeys / 4 : 1];  // kAlone: weights of the next key tile
  float rescale[2];  // factors of out before these are multiplied
  uint32_t queries[Config::kQueryRegisterSteps > 0 ? 4 * Config::kQueryRegisterSteps : 1];
  float base[2];   // weights are relative to 2^base
  float sum[2];    // sum of the weights of this thread's columns
  float added[2];  // kExponents: what the last weights will add to it
  [[no_unique_address]] Conditional<Config::kWiden, ScaleState<Config>, Nothing> fp8;
  uint32_t masks_phase = 0;  // masks
};

// Loads columns [16 * step, 16 * step + 16) of the warp's query rows as a left operand.
template <class Config>
__device__ __forceinline__ void load_query_step(typename Config::SharedMemory& shared, int consumer,
                                                int stage, int step, uint32_t (&to)[4]) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroupThreads / 32 * 16 + lane % 16;
  const int chunk = (step % 4 * 2 + lane / 16) ^ (row % 8);
  load_matrices(to, &Config::queries(shared, stage, consumer)[step / 4][row][chunk * 8]);
}

}  // namespace fovea::kernels::cuda
