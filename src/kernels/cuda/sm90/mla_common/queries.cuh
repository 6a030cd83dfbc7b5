// SPDX-License-Identifier: Apache-2.0
// Query rows: boxes of the copy engine to shared memory, and their conversion for fp8 keys.
#pragma once

#include "kernels/cuda/sm90/mla_common/work.cuh"

namespace fovea::kernels::cuda {

// A stage of the ring seen as column tiles of 64 query rows.
template <class C>
__device__ __forceinline__ uint16_t (*query_stage(typename C::SharedMemory& shared,
                                                  int stage))[kTileKeys][kTileColumns] {
  return reinterpret_cast<uint16_t(*)[kTileKeys][kTileColumns]>(&shared.kv[stage]);
}

// Token and head of a row of q. Computed before the wait for the preceding kernel, as it takes a
// division.
struct QueryPlace {
  int token, head;

  template <class C>
  __device__ __forceinline__ static QueryPlace of(const MlaDecodeParams& params,
                                                  const MlaItem& item, int rank, int row) {
    const int packed = item.first_row + rank * C::kRows + row;
    return {item.q_begin + packed / params.q_heads, packed % params.q_heads};
  }
};

// Loads the query rows of one work item: register tiles into stages of the ring from `ring` on, the
// others into shared.q. `first` is the place of the first row. Rows beyond the last valid one hold
// whatever memory holds there, since rows do not mix. One thread of each of C::kQueries.warps
// warps.
template <class C>
__device__ __forceinline__ void load_queries(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared, const MlaItem& item,
                                             int rank, const QueryPlace& first,
                                             Ring<C::kStages> ring) {
  const int warp = C::kQueries.warps > 1 ? threadIdx.x / 32 : 0;
  if (warp == 0) {
    shared.q_full.arrive_expecting(C::kRows * 128 * (C::kLatentTiles + C::kRopeTiles));
  }
  // A box of all column tiles takes as long as a box of one.
  const int box_tiles = params.q_box_rows == C::kRows ? C::kQueries.box_tiles : 1;
#pragma unroll 1
  for (int row = 0; row < C::kRows; row += params.q_box_rows) {
    const auto [token, head] = row == 0 ? first : QueryPlace::of<C>(params, item, rank, row);
    Ring<C::kStages> at = ring;
#pragma unroll 1
    for (int t = warp; t < C::kLatentTiles; t += C::kQueries.warps * box_tiles) {
      void* to;
      if (t < C::kQueries.register_tiles) {
        to = query_stage<C>(shared, at.stage)[t % C::kStageTiles][row];
        if (C::kQueries.warps == 1 && (t + box_tiles) % C::kStageTiles == 0) at.advance();
      } else {
        to = shared.q[t - C::kQueries.register_tiles][row];
      }
      load_box(to, params.q_latent_map, shared.q_full, kEvictNormal, 0, head, t, token);
    }
    if (C::kRopeTiles > 0 && warp == C::kQueries.warps - 1) {
      load_box(shared.q[C::kQueries.shared_tiles - 1][row], params.q_rope_map, shared.q_full, 0,
               head, token);
    }
  }
}

// Announces all work items and loads their queries. `announced`: another thread announces the first
// item. One thread.
template <class C>
__device__ __forceinline__ void produce_queries(const MlaDecodeParams& params,
                                                typename C::SharedMemory& shared,
                                                const FirstWork& first_work, bool announced) {
  const int4 place = first_work.place;
  const int rank = first_work.rank<C>();
  Ring<C::kStages> ring;
  Ring<kTileSlots> slot;
  uint32_t phase = 0;
  for (int i = place.x; i < place.y; i += place.z) {
    const bool is_first = i == place.x;
    const MlaItem item = is_first ? first_work.item : read_item(&params.work.items[i]);
    const int tiles = key_tiles(item);
    if (!is_first || !announced) announce_tile<C>(params, shared, &item, slot, rank);
    slot.advance();
    if (tiles == 0) continue;
    const auto query = QueryPlace::of<C>(params, item, rank, 0);
    const Ring<C::kStages> first = ring;
    // Awaited before the stages: by then they are at most one phase old.
    shared.q_empty.wait(phase ^ 1);
#pragma unroll
    for (int t = 0; t < C::kQueries.stages; ++t) {
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      // Keeps phases in step; no role waits for it. After the loads this arrival could be so late
      // that it counts for the keys that follow.
      shared.full[ring.stage].arrive();
      ring.advance();
    }
    wait_for_previous_kernel();
    load_queries<C>(params, shared, item, rank, query, first);
    phase ^= 1;
    ring.advance(C::kTileStages * tiles);
  }
  announce_tile<C>(params, shared, nullptr, slot, rank);
}

}  // namespace fovea::kernels::cuda
