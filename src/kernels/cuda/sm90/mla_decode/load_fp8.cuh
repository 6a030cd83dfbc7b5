// SPDX-License-Identifier: Apache-2.0
// Producer of fp8 caches: rows are copied to shared memory as they are and turned into f16 tiles by
// the same threads. f16 takes two instructions for two values, bf16 took seven.
#pragma once

#include "kernels/cuda/common/bf16_as.cuh"
#include "kernels/cuda/sm90/mla_decode/load_rows.cuh"

namespace fovea::kernels::cuda {

// Four e4m3 of `word` as f16, times both halves of `scale` where rows are scaled.
template <bool kScaled>
__device__ __forceinline__ void widen_e4m3(uint32_t word, uint32_t scale, uint32_t& low,
                                           uint32_t& high) {
  widen_four_e4m3(word, low, high);
  if constexpr (kScaled) {
    low = multiply_f16(low, scale);
    high = multiply_f16(high, scale);
  }
}

// Stores the 16 values of a piece, chunks 2 * at and the next of a swizzled row.
template <bool kScaled>
__device__ __forceinline__ void store_piece(const uint4& piece, uint32_t scale,
                                            uint16_t (&to)[kTileColumns], uint32_t row,
                                            uint32_t at) {
  uint4 wide;
  widen_e4m3<kScaled>(piece.x, scale, wide.x, wide.y);
  widen_e4m3<kScaled>(piece.y, scale, wide.z, wide.w);
  *reinterpret_cast<uint4*>(&to[((2 * at) ^ row % 8) * 8]) = wide;
  widen_e4m3<kScaled>(piece.z, scale, wide.x, wide.y);
  widen_e4m3<kScaled>(piece.w, scale, wide.z, wide.w);
  *reinterpret_cast<uint4*>(&to[((2 * at + 1) ^ row % 8) * 8]) = wide;
}

// What a lane has of four rows: 16 bytes, piece `piece` of each 128 columns, of one row. Eight
// lanes then read and store to all banks: rows are kRowBytes apart here, 128 bytes there.
template <class C>
struct LanePlace {
  uint32_t row, piece;
  __device__ __forceinline__ LanePlace() {
    const uint32_t lane = opaque(threadIdx.x) % 32;
    row = lane / 16 * 2 + lane / 4 % 2;
    piece = (lane % 4 + lane / 4 % 2 * 4 + lane / 8 % 2 * 4 - row * (C::kRowBytes / 16)) % 8;
  }
};

// Of a key tile, the first row that this warp converts.
template <class C>
__device__ __forceinline__ uint32_t first_row() {
  const uint32_t warp = opaque(threadIdx.x) / 32;
  return ((C::kShares ? block_rank<C>() * C::kKeyWarps : 0) + warp) * C::kWarpRows;
}

// Copies an item's keys to this warp's chunks, in the order in which they are converted. Lane i
// knows about row i % kWarpRows of the warp's.
template <class C>
struct RowCopies {
  const char* row;  // of the tile
  int request;
  KeyPlace at;   // of the next tile
  int page = 0;  // of the next tile
  int left;      // keys from the tile's row on, 0 or less behind the last one

  __device__ __forceinline__ RowCopies(const MlaDecodeParams& params, const KeySpan& item)
      : request(item.request),
        at(params, item.key_begin + row_of_lane()),
        left(item.key_end - item.key_begin - row_of_lane() + kTileKeys) {
    find_page(params);
  }
  __device__ __forceinline__ static int row_of_lane() {
    return static_cast<int>(first_row<C>() + threadIdx.x % C::kWarpRows);
  }
  __device__ __forceinline__ void find_page(const MlaDecodeParams& params) {
    if (left > kTileKeys) page = params.page_table[request * params.page_table_stride + at.number];
  }
  __device__ __forceinline__ void next_tile(const MlaDecodeParams& params) {
    row = static_cast<const char*>(params.cache) + page * params.page_stride +
          at.place * params.token_stride;
    left -= kTileKeys;
    at.next_tile(params);
    find_page(params);
  }

  // Rows behind the last key keep what stands there: nothing reads them as keys or values.
  __device__ __forceinline__ void copy(const MlaDecodeParams& params, int group,
                                       typename C::Chunk& to, TransactionBarrier& full) {
    if (group == 0) next_tile(params);
    const int lane = threadIdx.x % 32;
    if (lane / 4 != group) return;
    const int rows = min(max(left, 0), 4);  // of the group, in its first lane
    const bool joined = params.page_size % 4 == 0 && params.token_stride == C::kRowBytes;
    if (lane % 4 == 0) full.arrive_expecting(rows * C::kRowBytes);
    if (left > 0 && (lane % 4 == 0 || !joined)) {
      load_bytes(to.rows[lane % 4], row, (joined ? rows : 1) * C::kRowBytes, full, kEvictFirst);
    }
  }
};

// What a lane converts at a time: 16 values of each of two parts of 128 columns, and with the last
// ones bf16 RoPE columns. Read before any of it is stored, for reads behind a store wait for it.
struct Pieces {
  uint4 latent[2], rope;
  float2 scales;
};

template <class C>
__device__ __forceinline__ Pieces load_pieces(const typename C::Chunk& from,
                                              const LanePlace<C>& place, int part) {
  const uint4* row = from.rows[place.row];
  Pieces pieces;
  if constexpr (C::kScaled) {
    pieces.scales = reinterpret_cast<const float2*>(&row[C::kRank / 16])[part / 2];
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) pieces.latent[k] = row[place.piece + (part + k) * 8];
  if (C::kScaled && part + 2 == C::kLatentParts)
    pieces.rope = row[C::kRopeOffset / 16 + place.piece];
  return pieces;
}

// Swizzled as the copy engine does, into the stages from `ring` on. Waits for them if nothing is
// there yet.
template <class C>
__device__ __forceinline__ void store_pieces(typename C::SharedMemory& shared,
                                             const typename C::Chunk& from, const Pieces& pieces,
                                             const LanePlace<C>& place, uint32_t row, int part,
                                             bool first, Ring<C::kStages> ring,
                                             uint32_t rope_phase) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int tile = 2 * (part + k) % C::kStageTiles;
    if (tile == 0 && k > 0) ring.advance();
    if (tile == 0 && first) shared.empty[ring.stage].wait(ring.phase ^ 1);
    uint32_t scale = 0;
    if constexpr (C::kScaled) {
      const float factor = (k ? pieces.scales.y : pieces.scales.x) * kKeyFactor;
      scale = pack<f16>(factor, factor);
    }
    store_piece<C::kScaled>(pieces.latent[k], scale,
                            shared.kv[ring.stage].row(tile + place.piece / 4, row), row,
                            place.piece % 4);
  }
  if constexpr (C::kRopeTiles > 0) {
    if (part + 2 < C::kLatentParts) return;
    if (first) shared.rope_empty[0].wait(rope_phase ^ 1);
    if constexpr (C::kScaled) {
      *reinterpret_cast<uint4*>(&shared.rope[0].row(0, row)[(place.piece ^ row % 8) * 8]) =
          bf16_as<C::kRopeMath>(pieces.rope);
    } else if (place.piece < 4) {
      store_piece<false>(from.rows[place.row][C::kRopeOffset / 16 + place.piece], 0,
                         shared.rope[0].row(0, row), row, place.piece);
    }
  }
}

// This warp's rows of a stage are complete, and those it converts for the other block on their way
// there.
template <class C, int kTiles>
__device__ __forceinline__ void hand_over(KeyTiles<kTiles>& keys, TransactionBarrier& full) {
  if constexpr (C::kShares) {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    constexpr int kBytes = KeyTiles<kTiles>::kGroupBytes;
    copy_in_cluster(&keys.groups[first_row<C>() / kGroupKeys], block_rank<C>() ^ 1, kBytes, full);
    full.arrive_expecting(kBytes);  // a warp of the other block sends as many
  } else {
    release(full);
  }
}

// The keys of one work item. All warps of the producer.
template <class C>
__device__ __forceinline__ void convert_keys(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared, const KeySpan& item,
                                             int tiles, Ring<C::kStages>& ring,
                                             Ring<C::kChunks>& chunk, uint32_t& rope_phase) {
  if (tiles == 0) return;
  const uint32_t warp = threadIdx.x / 32;
  typename C::Chunk(&chunks)[C::kChunks] = shared.chunks[warp];
  TransactionBarrier(&full)[C::kChunks] = shared.chunk_full[warp];
  RowCopies<C> copies(params, item);
  int left = tiles * C::kWarpGroups;  // groups that are not converted yet
  Ring<C::kChunks> ahead = chunk;
  for (int i = 0; i < min(C::kChunks, left); ++i) {
    copies.copy(params, i % C::kWarpGroups, chunks[ahead.stage], full[ahead.stage]);
    ahead.advance();
  }
  // The next rows to where those of `group` have been.
  const auto refill = [&](int group, Ring<C::kChunks> at) {
    __syncwarp();  // all lanes have read
    if (--left < C::kChunks) return;
    copies.copy(params, (group + C::kChunks) % C::kWarpGroups, chunks[at.stage], full[at.stage]);
  };
  const auto convert = [&]<int kPass>() {
    constexpr int kParts = C::kLatentParts / C::kPasses;
    Ring<C::kChunks> at = chunk;
#pragma unroll 1
    for (int group = 0; group < C::kWarpGroups; ++group) {
      const LanePlace<C> place;
      const typename C::Chunk& from = chunks[at.stage];
      if (kPass == 0) full[at.stage].wait(at.phase);
#pragma unroll
      for (int p = 0; p < kParts; p += 2) {
        const int part = kPass * kParts + p;
        Ring<C::kStages> to = ring;
        to.advance(2 * p / C::kStageTiles);
        store_pieces<C>(shared, from, load_pieces<C>(from, place, part), place,
                        first_row<C>() + 4 * group + place.row, part, group == 0, to, rope_phase);
      }
      if (!C::kShares) refill(group, at);
      at.advance();
    }
    fence_async_proxy();
#pragma unroll
    for (int stage = 0; stage < 2 * C::kHalfStages / C::kPasses; ++stage) {
      hand_over<C>(shared.kv[ring.stage], shared.full[ring.stage]);
      ring.advance();
    }
    if (kPass + 1 == C::kPasses) chunk = at;
  };
  for (int t = 0; t < tiles; ++t) {
    Ring<C::kChunks> read = chunk;
    convert.template operator()<0>();
    if constexpr (C::kPasses == 2) convert.template operator()<1>();
    if constexpr (C::kRopeTiles > 0) {
      hand_over<C>(shared.rope[0], shared.rope_full[0]);
      rope_phase ^= 1;
    }
    if constexpr (C::kShares) {  // behind what others wait for
#pragma unroll
      for (int group = 0; group < C::kWarpGroups; ++group) {
        refill(group, read);
        read.advance();
      }
    }
  }
}

}  // namespace fovea::kernels::cuda
