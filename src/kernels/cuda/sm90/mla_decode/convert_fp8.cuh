// SPDX-License-Identifier: Apache-2.0
// Producer of fp8 caches: the same threads copy rows to shared memory as they are and turn them
// into f16 tiles. Converting two values to f16 takes two instructions, to bf16 seven.
#pragma once

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/sm90/mla_common/load_rows.cuh"
#include "kernels/cuda/sm90/mla_decode/config.cuh"

namespace fovea::kernels::cuda {

// Shape of the conversion. A warp converts 16 rows of a key tile, or 8 of a shared one, in chunks
// of four.
template <class C>
struct ConversionShape {
  static constexpr bool kScaled = C::kKeys == fp8_rows;
  static constexpr int kChunks = C::Fp8Memory::kChunks;
  static constexpr int kWarpRows = kTileKeys / (C::kShares ? 2 : 1) / C::kKeyWarps;
  static_assert(!C::kShares || kWarpRows == kGroupKeys);
  static constexpr int kTileChunks = kWarpRows / 4;  // chunks of a warp in a key tile
  // With two passes, half L of all rows is converted first, as its stage is free first. That needs
  // all of a tile's chunks at a time.
  static constexpr int kPasses = C::kShares && C::kRank == 512 ? 2 : 1;
};

// The 16 bytes that a lane has of four rows: piece `piece` of each 128 columns of row `row`. Eight
// lanes then read and store to all banks: rows are Row::kBytes apart in a chunk, 128 bytes in a
// tile.
template <class C>
struct LanePlace {
  uint32_t row, piece;
  __device__ __forceinline__ LanePlace() {
    const uint32_t lane = opaque(threadIdx.x) % 32;
    row = lane / 16 * 2 + lane / 4 % 2;
    piece = (lane % 4 + lane / 4 % 2 * 4 + lane / 8 % 2 * 4 - row * (C::Row::kBytes / 16)) % 8;
  }
};

// The first row of a key tile that this warp converts.
template <class C>
__device__ __forceinline__ uint32_t first_row() {
  const uint32_t warp = opaque(threadIdx.x) / 32;
  return ((C::kShares ? block_rank<C>() * C::kKeyWarps : 0) + warp) * ConversionShape<C>::kWarpRows;
}

// Copies an item's keys to this warp's chunks, in the order of their conversion. Lane i tracks row
// i % kWarpRows of the warp's rows.
template <class C>
struct RowCopies {
  static constexpr int kWarpRows = ConversionShape<C>::kWarpRows;
  const char* row;  // the lane's row of the tile
  int request;
  KeyPlace at;   // the lane's key of the next tile
  int page = 0;  // page of that key
  int left;      // keys from the tile's row to the end; 0 or less: none

  __device__ __forceinline__ RowCopies(const MlaDecodeParams& params, const KeySpan& item)
      : request(item.request),
        at(params, item.key_begin + row_of_lane()),
        left(item.key_end - item.key_begin - row_of_lane() + kTileKeys) {
    find_page(params);
  }
  __device__ __forceinline__ static int row_of_lane() {
    return static_cast<int>(first_row<C>() + threadIdx.x % kWarpRows);
  }
  __device__ __forceinline__ void find_page(const MlaDecodeParams& params) {
    if (left > kTileKeys)
      page = params.page_table.pages[request * params.page_table.stride + at.number];
  }
  __device__ __forceinline__ void next_tile(const MlaDecodeParams& params) {
    row = static_cast<const char*>(params.cache) + page * params.page_stride +
          at.place * params.token_stride;
    left -= kTileKeys;
    at.next_tile(params);
    find_page(params);
  }

  // Copies chunk `chunk` of the tile. Rows after the last key keep their old bytes: nothing reads
  // them as keys or values.
  __device__ __forceinline__ void copy(const MlaDecodeParams& params, int chunk,
                                       typename C::Chunk& to, TransactionBarrier& full) {
    if (chunk == 0) next_tile(params);
    const int lane = threadIdx.x % 32;
    if (lane / 4 != chunk) return;
    const int rows = min(max(left, 0), 4);  // rows of the chunk, in its first lane
    const bool joined = params.page_size % 4 == 0 && params.token_stride == C::Row::kBytes;
    if (lane % 4 == 0) full.arrive_expecting(rows * C::Row::kBytes);
    if (left > 0 && (lane % 4 == 0 || !joined)) {
      load_bytes(to.rows[lane % 4], row, (joined ? rows : 1) * C::Row::kBytes, full, kEvictFirst);
    }
  }
};

// The values that a lane converts at a time: 16 of each of two groups of 128 columns, and with the
// last ones bf16 RoPE columns. All are read before any is stored, as a read after a store waits for
// it.
struct Pieces {
  uint4 latent[2], rope;
  float2 scales;
};

// Converts the rows of one chunk to a key tile.
template <class C>
class ChunkConverter {
 public:
  static constexpr bool kScaled = ConversionShape<C>::kScaled;
  // `from` is chunk `number` of the warp in the key tile.
  __device__ __forceinline__ ChunkConverter(typename C::SharedMemory& shared,
                                            const typename C::Chunk& from, int number)
      : shared_(shared), from_(from), number_(number) {}

  // Converts column groups `part` and `part` + 1 of 128 columns into the stages from `ring` on.
  // `first`: nothing is stored there yet, so it waits for free stages.
  __device__ __forceinline__ void convert(int part, bool first, Ring<C::kStages> ring,
                                          uint32_t rope_phase) const {
    const Pieces pieces = load(part);
    // Computed anew in each call, since registers are short.
    const uint32_t row = first_row<C>() + 4 * number_ + place_.row;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int tile = 2 * (part + k) % C::kStageTiles;
      if (tile == 0 && k > 0) ring.advance();
      if (tile == 0 && first) shared_.empty[ring.stage].wait(ring.phase ^ 1);
      uint32_t scale = 0;
      if constexpr (kScaled) {
        const float factor = (k ? pieces.scales.y : pieces.scales.x) * kKeyFactor;
        scale = pack<f16>(factor, factor);
      }
      store<kScaled>(pieces.latent[k], scale,
                     shared_.kv[ring.stage].row(tile + place_.piece / 4, row), row,
                     place_.piece % 4);
    }
    if constexpr (C::kRopeTiles > 0) {
      if (part + 2 < C::Row::kScales) return;
      if (first) shared_.rope_empty[0].wait(rope_phase ^ 1);
      if constexpr (kScaled) {
        *reinterpret_cast<uint4*>(&shared_.rope[0].row(0, row)[(place_.piece ^ row % 8) * 8]) =
            bf16_as<C::kRopeMath>(pieces.rope);
      } else if (place_.piece < 4) {
        store<false>(from_.rows[place_.row][C::Row::kRopeOffset / 16 + place_.piece], 0,
                     shared_.rope[0].row(0, row), row, place_.piece);
      }
    }
  }

 private:
  __device__ __forceinline__ Pieces load(int part) const {
    const uint4* row = from_.rows[place_.row];
    Pieces pieces;
    if constexpr (kScaled) {
      pieces.scales = reinterpret_cast<const float2*>(&row[C::kRank / 16])[part / 2];
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) pieces.latent[k] = row[place_.piece + (part + k) * 8];
    if (kScaled && part + 2 == C::Row::kScales) {
      pieces.rope = row[C::Row::kRopeOffset / 16 + place_.piece];
    }
    return pieces;
  }

  // Stores the 16 values of a piece to chunks 2 * at and 2 * at + 1 of a row, swizzled as the copy
  // engine does.
  template <bool kScale>
  __device__ __forceinline__ static void store(const uint4& piece, uint32_t scale,
                                               uint16_t (&to)[kTileColumns], uint32_t row,
                                               uint32_t at) {
    uint4 wide;
    widen_e4m3<kScale>(piece.x, scale, wide.x, wide.y);
    widen_e4m3<kScale>(piece.y, scale, wide.z, wide.w);
    *reinterpret_cast<uint4*>(&to[((2 * at) ^ row % 8) * 8]) = wide;
    widen_e4m3<kScale>(piece.z, scale, wide.x, wide.y);
    widen_e4m3<kScale>(piece.w, scale, wide.z, wide.w);
    *reinterpret_cast<uint4*>(&to[((2 * at + 1) ^ row % 8) * 8]) = wide;
  }

  typename C::SharedMemory& shared_;
  const typename C::Chunk& from_;
  const int number_;
  const LanePlace<C> place_;
};

// Copies and converts the keys of work items. All warps of the producer.
template <class C>
class RowConverter {
 public:
  using Shape = ConversionShape<C>;
  using Item = KeySpan;

  __device__ __forceinline__ RowConverter(const MlaDecodeParams& params,
                                          typename C::SharedMemory& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ Item find(const KeySpan& item) const { return item; }
  __device__ __forceinline__ void pass_query_stage(TransactionBarrier& full) const {
    release(full);
  }

  __device__ __forceinline__ void load(const Item& item, int tiles, Ring<C::kStages>& ring) {
    if (tiles == 0) return;
    const uint32_t warp = threadIdx.x / 32;
    Chunk(&chunks)[Shape::kChunks] = shared_.chunks[warp];
    TransactionBarrier(&full)[Shape::kChunks] = shared_.chunk_full[warp];
    RowCopies<C> copies(params_, item);
    int left = tiles * Shape::kTileChunks;  // chunks that are not converted yet
    Ring<Shape::kChunks> ahead = chunk_;
    for (int i = 0; i < min(Shape::kChunks, left); ++i) {
      copies.copy(params_, i % Shape::kTileChunks, chunks[ahead.stage], full[ahead.stage]);
      ahead.advance();
    }
    // Copies the next rows over chunk `number`.
    const auto refill = [&](int number, Ring<Shape::kChunks> at) {
      __syncwarp();  // all lanes have read
      if (--left < Shape::kChunks) return;
      copies.copy(params_, (number + Shape::kChunks) % Shape::kTileChunks, chunks[at.stage],
                  full[at.stage]);
    };
    const auto convert = [&]<int kPass>() {
      constexpr int kParts = C::Row::kScales / Shape::kPasses;
      Ring<Shape::kChunks> at = chunk_;
#pragma unroll 1
      for (int number = 0; number < Shape::kTileChunks; ++number) {
        const ChunkConverter<C> converter(shared_, chunks[at.stage], number);
        if (kPass == 0) full[at.stage].wait(at.phase);
#pragma unroll
        for (int p = 0; p < kParts; p += 2) {
          Ring<C::kStages> to = ring;
          to.advance(2 * p / C::kStageTiles);
          converter.convert(kPass * kParts + p, number == 0, to, rope_phase_);
        }
        if (!C::kShares) refill(number, at);
        at.advance();
      }
      fence_async_proxy();
#pragma unroll
      for (int stage = 0; stage < C::kTileStages / Shape::kPasses; ++stage) {
        hand_over(shared_.kv[ring.stage], shared_.full[ring.stage]);
        ring.advance();
      }
      if (kPass + 1 == Shape::kPasses) chunk_ = at;
    };
    for (int t = 0; t < tiles; ++t) {
      Ring<Shape::kChunks> read = chunk_;
      convert.template operator()<0>();
      if constexpr (Shape::kPasses == 2) convert.template operator()<1>();
      if constexpr (C::kRopeTiles > 0) {
        hand_over(shared_.rope[0], shared_.rope_full[0]);
        rope_phase_ ^= 1;
      }
      if constexpr (C::kShares) {  // after everything that other roles wait for
#pragma unroll
        for (int number = 0; number < Shape::kTileChunks; ++number) {
          refill(number, read);
          read.advance();
        }
      }
    }
  }

 private:
  using Chunk = typename C::Chunk;

  // This warp's rows of a stage are complete. Rows that it converts for the other block are sent
  // there.
  template <int kTiles>
  __device__ __forceinline__ static void hand_over(KeyTiles<kTiles>& keys,
                                                   TransactionBarrier& full) {
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

  const MlaDecodeParams& params_;
  typename C::SharedMemory& shared_;
  Ring<Shape::kChunks> chunk_;
  uint32_t rope_phase_ = 0;
};

}  // namespace fovea::kernels::cuda
