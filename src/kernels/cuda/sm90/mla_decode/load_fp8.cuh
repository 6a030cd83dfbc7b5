// SPDX-License-Identifier: Apache-2.0
// Producer of fp8 caches: rows are copied to shared memory as they are and turned into f16 tiles by
// the same threads. f16 takes two instructions for two values, bf16 took seven.
#pragma once

#include "kernels/cuda/sm90/mla_decode/load.cuh"

namespace fovea::kernels::cuda {

__device__ __forceinline__ uint32_t multiply_f16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Four e4m3 of `word` as f16, times both halves of `scale` where rows are scaled.
template <bool kScaled>
__device__ __forceinline__ void widen_e4m3(uint32_t word, uint32_t scale, uint32_t& low,
                                           uint32_t& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(word));
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

// What a lane has of four rows: 16 bytes, piece `piece` of each 128 columns, of one row. Eight lanes
// then read and store to all banks: rows are kRowBytes apart here, 128 bytes there.
template <class C>
struct LanePlace {
  uint32_t row, piece;
  __device__ __forceinline__ LanePlace() {
    const uint32_t lane = fresh(threadIdx.x) % 32;
    row = lane / 16 * 2 + lane / 4 % 2;
    piece = (lane % 4 + lane / 4 % 2 * 4 + lane / 8 % 2 * 4 - row * (C::kRowBytes / 16)) % 8;
  }
};

// Bytes that are read once, or twice at the same time, as load_cache_box.
__device__ __forceinline__ void load_rows(void* shared, const char* from, int bytes,
                                         TransactionBarrier& barrier) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], "
      "%2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier)), "l"(kEvictFirst)
      : "memory");
}

// Copies an item's keys to this warp's chunks, in the order in which they are converted. Lane i
// knows about row i % kWarpRows of the warp's.
template <class C>
struct RowCopies {
  const char* row;  // of the tile
  int left;         // keys from that row on, 0 or less behind the last one
  int page;         // of the next tile
  int key, end;     // of the next tile; of the item

  __device__ __forceinline__ int row_key() const {
    const uint32_t thread = fresh(threadIdx.x);
    return key + static_cast<int>(thread / 32 * C::kWarpRows + thread % C::kWarpRows);
  }
  __device__ __forceinline__ void find_page(const MlaDecodeParams& params, int request) {
    const int at = row_key();
    page = at < end ? params.page_table[request * params.page_table_stride + at / params.page_size]
                    : 0;
  }
  __device__ __forceinline__ void next_tile(const MlaDecodeParams& params, int request) {
    const int at = row_key();
    row = static_cast<const char*>(params.cache) + page * params.page_stride +
          at % params.page_size * params.token_stride;
    left = end - at;
    key += kTileKeys;
    find_page(params, request);
  }

  // Rows behind the last key keep what stands there: nothing reads them as keys or values.
  __device__ __forceinline__ void copy(const MlaDecodeParams& params, int request, int group,
                                       typename C::Chunk& to, TransactionBarrier& full) {
    if (group == 0) next_tile(params, request);
    const int lane = threadIdx.x % 32;
    if (lane / 4 != group) return;
    const int rows = min(max(left, 0), 4);  // of the group, in its first lane
    const bool joined = params.page_size % 4 == 0 && params.token_stride == C::kRowBytes;
    if (lane % 4 == 0) full.arrive_expecting(rows * C::kRowBytes);
    if (left > 0 && (lane % 4 == 0 || !joined)) {
      load_rows(to.rows[lane % 4], row, (joined ? rows : 1) * C::kRowBytes, full);
    }
  }
};

// Four rows from `first` of the key tile whose stages begin at `ring`, swizzled as the copy engine
// does. Before the first rows of a tile, waits for its stages.
template <class C>
__device__ __forceinline__ void convert_rows(typename C::SharedMemory& shared,
                                             const typename C::Chunk& from, uint32_t first,
                                             bool starts_tile, Ring<C::kStages> ring,
                                             uint32_t rope_phase) {
  const LanePlace<C> place;
  const uint32_t row = first + place.row;
  const uint4* pieces = &from.rows[place.row][place.piece];
  float scales[C::kLatentParts];
  if constexpr (C::kScaled) {
    static_assert(C::kLatentParts == 4);
    *reinterpret_cast<uint4*>(scales) = from.rows[place.row][C::kRank / 16];
  }
#pragma unroll
  for (int part = 0; part < C::kLatentParts; part += 2) {
    // Reads behind a store wait for it.
    const uint4 both[2] = {pieces[part * 8], pieces[part * 8 + 8]};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int tile = 2 * (part + k) % C::kStageTiles;
      if (tile == 0 && part + k > 0) ring.advance();
      if (tile == 0 && starts_tile) shared.empty[ring.stage].wait(ring.phase ^ 1);
      uint32_t scale = 0;
      if constexpr (C::kScaled) {
        scale = pack<f16>(scales[part + k] * kKeyFactor, scales[part + k] * kKeyFactor);
      }
      store_piece<C::kScaled>(both[k], scale,
                              shared.kv[ring.stage].row(tile + place.piece / 4, row), row,
                              place.piece % 4);
    }
  }
  if constexpr (C::kRopeTiles > 0) {
    if (starts_tile) shared.rope_empty.wait(rope_phase ^ 1);
    if constexpr (C::kScaled) {
      *reinterpret_cast<uint4*>(&shared.rope.row(0, row)[(place.piece ^ row % 8) * 8]) =
          pieces[C::kRopeOffset / 16];
    } else if (place.piece < 4) {
      store_piece<false>(pieces[C::kRopeOffset / 16], 0, shared.rope.row(0, row), row, place.piece);
    }
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
  RowCopies<C> copies;
  copies.key = item.key_begin;
  copies.end = item.key_end;
  copies.find_page(params, item.request);
  int left = tiles * C::kWarpGroups;  // groups that are not converted yet
  Ring<C::kChunks> ahead = chunk;
  for (int i = 0; i < min(C::kChunks, left); ++i) {
    copies.copy(params, item.request, i % C::kWarpGroups, chunks[ahead.stage], full[ahead.stage]);
    ahead.advance();
  }
  for (int t = 0; t < tiles; ++t) {
#pragma unroll 1
    for (int group = 0; group < C::kWarpGroups; ++group) {
      full[chunk.stage].wait(chunk.phase);
      convert_rows<C>(shared, chunks[chunk.stage], warp * C::kWarpRows + 4 * group, group == 0,
                      ring, rope_phase);
      __syncwarp();  // all lanes have read
      if (--left >= C::kChunks) {
        copies.copy(params, item.request, (group + C::kChunks) % C::kWarpGroups,
                    chunks[chunk.stage], full[chunk.stage]);
      }
      chunk.advance();
    }
    fence_async_proxy();
#pragma unroll
    for (int stage = 0; stage < 2 * C::kHalfStages; ++stage) {
      release(shared.full[ring.stage]);
      ring.advance();
    }
    if constexpr (C::kRopeTiles > 0) {
      release(shared.rope_full);
      rope_phase ^= 1;
    }
  }
}

}  // namespace fovea::kernels::cuda
