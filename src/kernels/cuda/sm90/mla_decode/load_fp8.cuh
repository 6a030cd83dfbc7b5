// SPDX-License-Identifier: Apache-2.0
// Producer of fp8 caches: rows are copied to shared memory as they are and turned into 16-bit tiles
// by the same threads.
#pragma once

#include "kernels/cuda/sm90/mla_decode/load.cuh"

namespace fovea::kernels::cuda {

// e4m3 bytes 2 * kHigh and the next of `word` as bf16, exactly, but for 2^120: the sign goes to the
// top, exponent and mantissa to the lowest bits of theirs. NaN becomes 480.
template <bool kHigh>
__device__ __forceinline__ uint32_t widen_e4m3(uint32_t word) {
  uint32_t wide;  // 16 bits each, with the sign repeated
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(wide) : "r"(word), "n"(kHigh ? 0xb3a2 : 0x9180));
  return (wide << 4) & 0x87f087f0u;
}

__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
__device__ __forceinline__ uint32_t multiply_add_bf16(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// A factor as the sum of two bf16, so that products are rounded once (but for 2^-17 of them).
struct SplitFactor {
  uint32_t high, low;  // twice each
  __device__ __forceinline__ explicit SplitFactor(float factor) {
    high = pack<bf16>(factor, factor);
    const float rest = factor - __uint_as_float(high << 16);
    low = pack<bf16>(rest, rest);
  }
};

// Eight values.
template <bool kScaled>
__device__ __forceinline__ uint4 convert_chunk(uint32_t first, uint32_t second,
                                               const SplitFactor& factor) {
  constexpr uint32_t kExponent = 0x7b807b80;  // 2^120 twice
  uint32_t words[4] = {widen_e4m3<false>(first), widen_e4m3<true>(first),
                       widen_e4m3<false>(second), widen_e4m3<true>(second)};
#pragma unroll
  for (uint32_t& word : words) {
    word = multiply_bf16(word, kExponent);
    if constexpr (kScaled) {
      word = multiply_add_bf16(word, factor.high, multiply_bf16(word, factor.low));
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// What a lane has of four rows: 16 bytes, piece `piece` of each 128 columns, of one row. Eight lanes
// then store to all banks.
struct LanePlace {
  uint32_t row, piece;
  __device__ __forceinline__ LanePlace() {
    const uint32_t lane = fresh(threadIdx.x) % 32;
    row = lane / 16 * 2 + lane / 4 % 2;
    piece = lane / 8 % 2 * 4 + lane % 4;
  }
};

// Copies an item's keys to this warp's chunks, in the order in which they are converted. Lane i
// knows about row i % kWarpRows of the warp's.
template <class C>
struct RowCopies {
  static constexpr uint32_t kNoRow = ~0u;
  const char* cache;
  uint32_t row;  // of the tile, in units of 16 bytes; kNoRow behind the last key
  int page;      // of the next tile
  int key, end;  // of the next tile; of the item

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
    const int64_t bytes = page * params.page_stride + at % params.page_size * params.token_stride;
    row = at < end ? static_cast<uint32_t>(bytes / 16) : kNoRow;
    key += kTileKeys;
    find_page(params, request);
  }

  // Tiles behind the last one are copied as zeros: waits count copies.
  __device__ __forceinline__ void copy(const MlaDecodeParams& params, int request, int group,
                                       typename C::Chunk& to) {
    if (group == 0) next_tile(params, request);
    const LanePlace place;
    const uint32_t own = __shfl_sync(~0u, row, 4 * group + place.row);
    const int bytes = own != kNoRow ? 16 : 0;
    const char* from = cache + (own != kNoRow ? own * 16ll : 0);
    const char* piece = from + place.piece * 16;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < C::kLatentParts; ++part) {
      copy_async(&to.latent[part][lane], piece + part * 128, bytes);
    }
    if (place.piece * 16 < C::kRopeBytes) {
      copy_async(&to.rope[lane], piece + C::kRopeOffset, bytes);
    }
    if (C::kScaled && place.piece == 0) {
      copy_async(&to.scales[place.row], from + C::kRank, bytes);
    }
    commit_copies();
  }
};

// Stores the 16 values of a piece, chunks 2 * at and the next of a swizzled row.
template <bool kScaled>
__device__ __forceinline__ void store_piece(const uint4& piece, const SplitFactor& factor,
                                            uint16_t (&to)[kTileKeys][kTileColumns], uint32_t row,
                                            uint32_t at) {
  *reinterpret_cast<uint4*>(&to[row][((2 * at) ^ row % 8) * 8]) =
      convert_chunk<kScaled>(piece.x, piece.y, factor);
  *reinterpret_cast<uint4*>(&to[row][((2 * at + 1) ^ row % 8) * 8]) =
      convert_chunk<kScaled>(piece.z, piece.w, factor);
}

// Four rows from `first` of the key tile whose stages begin at `ring`, swizzled as the copy engine
// does. Before the first rows of a tile, waits for its stages.
template <class C>
__device__ __forceinline__ void convert_rows(typename C::SharedMemory& shared,
                                             const typename C::Chunk& from, uint32_t first,
                                             bool starts_tile, Ring<C::kStages> ring,
                                             uint32_t rope_phase) {
  const LanePlace place;
  const uint32_t row = first + place.row;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int part = 0; part < C::kLatentParts; part += 2) {
    // Reads behind a store wait for it.
    const uint4 both[2] = {from.latent[part][lane], from.latent[part + 1][lane]};
    float scales[2] = {1, 1};
    if constexpr (C::kScaled) {
      scales[0] = from.scales[place.row][part];
      scales[1] = from.scales[place.row][part + 1];
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int tile = 2 * (part + k) % C::kStageTiles;
      if (tile == 0 && part + k > 0) ring.advance();
      if (tile == 0 && starts_tile) shared.empty[ring.stage].wait(ring.phase ^ 1);
      store_piece<C::kScaled>(both[k], SplitFactor(scales[k]),
                              shared.kv[ring.stage][tile + place.piece / 4], row, place.piece % 4);
    }
  }
  if constexpr (C::kRopeTiles > 0) {
    if (starts_tile) shared.rope_empty.wait(rope_phase ^ 1);
    const uint4 rope = from.rope[lane];
    if constexpr (C::kScaled) {
      *reinterpret_cast<uint4*>(&shared.rope[row][(place.piece ^ row % 8) * 8]) = rope;
    } else if (place.piece < 4) {
      store_piece<false>(rope, SplitFactor(1), shared.rope, row, place.piece);
    }
  }
}

// The keys of one work item. All warps of the producer.
template <class C>
__device__ __forceinline__ void convert_keys(const MlaDecodeParams& params,
                                             typename C::SharedMemory& shared, const MlaItem& item,
                                             int tiles, Ring<C::kStages>& ring,
                                             uint32_t& rope_phase) {
  if (tiles == 0) return;
  const uint32_t warp = threadIdx.x / 32;
  typename C::Chunk(&chunks)[C::kChunks] = shared.chunks[warp];
  RowCopies<C> copies;
  copies.cache = static_cast<const char*>(params.cache);
  copies.key = item.key_begin;
  copies.end = item.key_end;
  copies.find_page(params, item.request);
  for (int i = 0; i < C::kChunks; ++i) {
    copies.copy(params, item.request, i % C::kWarpGroups, chunks[i]);
  }
  int slot = 0;
  for (int t = 0; t < tiles; ++t) {
#pragma unroll 1
    for (int group = 0; group < C::kWarpGroups; ++group) {
      wait_copies<C::kChunks - 1>();
      __syncwarp();  // the other lanes' scales
      convert_rows<C>(shared, chunks[slot], warp * C::kWarpRows + 4 * group, group == 0, ring,
                      rope_phase);
      __syncwarp();  // all lanes have read their scales
      copies.copy(params, item.request, (group + C::kChunks) % C::kWarpGroups, chunks[slot]);
      if (++slot == C::kChunks) slot = 0;
    }
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
  wait_copies<0>();
}

}  // namespace fovea::kernels::cuda
