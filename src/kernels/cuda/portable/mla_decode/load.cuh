// SPDX-License-Identifier: Apache-2.0
// Loads queries into registers and keys into shared memory. Rows after an item's last key are zero,
// so that no data of another request and no NaN of an unused slot can reach a product.
#pragma once

#include "kernels/cuda/common/bf16_as.cuh"
#include "kernels/cuda/common/fp8_values.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/visibility.cuh"
#include "kernels/cuda/portable/mla_decode/config.cuh"

namespace fovea::kernels::cuda {

// The share of a warp among the warps that have the same rows. Computed anew wherever it is needed,
// since registers are short.
template <class C>
struct WarpPlace {
  int first_row;    // in the row tile
  int column_part;  // quarter of the columns, for score products
  int first_key;    // for score products
  int first_value;  // first column of the values
  __device__ WarpPlace() {
    const int warp = opaque(threadIdx.x) / 32;
    const int among = warp % C::kSharing;
    first_row = warp / C::kSharing * 16 * C::kRowTiles;
    column_part = among % C::kColumnParts;
    first_key = among / C::kColumnParts * C::kScoreKeys;
    first_value = among * C::kValueColumns;
  }
};

// Returns the first column of step `step` of a warp's score products: 16 latent columns a step,
// then RoPE columns. All warps have the same number of both.
template <class C>
__device__ __forceinline__ int step_column(int column_part, int step) {
  return step < C::kLatentSteps
             ? column_part * (C::kRank / C::kColumnParts) + step * 16
             : C::kRank + column_part * ((C::kColumns - C::kRank) / C::kColumnParts) +
                   (step - C::kLatentSteps) * 16;
}

// The left operands of a warp's score products.
template <class C>
struct Queries {
  uint32_t of[C::kRowTiles][C::kSteps][4];
};

// Two values of q as operands. Latent values are divided by kKeyFactor, which scaled keys carry.
template <class C, bool kIsLatent>
__device__ __forceinline__ uint32_t query_pair(uint32_t pair) {
  constexpr Type kTo = kIsLatent ? C::kMath : C::kRopeMath;
  constexpr float kFactor = kIsLatent && C::kScaled ? 1 / kKeyFactor : 1;
  if constexpr (kTo == C::kQ && kFactor == 1) return pair;
  return pack<kTo>(to_float<C::kQ>(static_cast<uint16_t>(pair)) * kFactor,
                   to_float<C::kQ>(static_cast<uint16_t>(pair >> 16)) * kFactor);
}

// Returns how many of the row tile's rows exist.
template <class C>
__device__ __forceinline__ int live_rows(const PortableMlaParams& params, const MlaItem& item) {
  return min(C::kRows, item.q_len * params.batch.q_heads - item.first_row);
}

template <class C>
__device__ __forceinline__ void load_queries(const PortableMlaParams& params, const MlaItem& item,
                                             Queries<C>& queries) {
  const WarpPlace<C> place;
  const int lane = threadIdx.x % 32;
  const int live = live_rows<C>(params, item);
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.first_row + tile * 16 + half * 8 + lane / 4;
      const bool exists = row < live;
      const int packed = item.first_row + (exists ? row : 0);
      const int64_t token = item.q_begin + packed / params.batch.q_heads;
      const int64_t head = packed % params.batch.q_heads;
      const auto* latent = static_cast<const uint16_t*>(params.q_latent.data) +
                           token * params.q_latent.token_stride +
                           head * params.q_latent.head_stride;
      const auto* rope = static_cast<const uint16_t*>(params.q_rope.data) +
                         token * params.q_rope.token_stride + head * params.q_rope.head_stride;
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
        const int column = step_column<C>(place.column_part, step) + lane % 4 * 2;
        const bool is_latent = step < C::kLatentSteps;
        const auto* from = reinterpret_cast<const uint32_t*>(
            is_latent ? latent + column : rope + (column - C::kRank));
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint32_t pair = exists ? from[4 * k] : 0;
          queries.of[tile][step][half + 2 * k] =
              is_latent ? query_pair<C, true>(pair) : query_pair<C, false>(pair);
        }
      }
    }
  }
}

template <class C>
__device__ __forceinline__ uint16_t* chunk_of(typename C::Element (&tile)[C::kKeys][C::kColumns],
                                              int row, int chunk) {
  return &tile[row][(chunk ^ row % 8) * 8];
}

// Loads an item's keys to shared memory, tile after tile. A warp has kWarpKeys rows of each tile;
// kRowLanes lanes copy one row.
template <class C>
class KeyLoader {
 public:
  // Starts the first copies.
  __device__ __forceinline__ KeyLoader(const PortableMlaParams& params,
                                       typename C::SharedMemory& shared, const MlaItem& item)
      : params_(params),
        shared_(shared),
        table_(params.page_table.pages + item.request * params.page_table.stride),
        key_(item.key_begin + first_row() + threadIdx.x % 32 / kRowLanes),
        end_(item.key_end) {
    find_page();
    constexpr int kBegun = C::kFp8 ? C::kRawTiles : C::kTiles - 2;
    for (int tile = 0; tile < kBegun; ++tile) copy(tile);
  }

  // Tile `tile` is complete after all threads have returned and synchronised. Tiles before the last
  // are no longer read.
  __device__ __forceinline__ void prepare(int tile) {
    if constexpr (C::kFp8) {
      wait_copies<C::kRawTiles - 1>();
      __syncwarp();  // other lanes' copies are complete too
      convert(tile);
      __syncwarp();
      copy(tile + C::kRawTiles);
    } else {
      copy(tile + C::kTiles - 2);
      wait_copies<C::kTiles - 2>();
    }
  }

 private:
  // Copies are 16-byte chunks; a warp copies some rows of each key tile.
  static constexpr int kWarpKeys = C::kKeys / kWarps;
  static constexpr int kRowLanes = 32 / kWarpKeys;
  static constexpr int kRowChunks = C::kRowBytes / 16;

  // This warp's first row of a tile.
  __device__ __forceinline__ static int first_row() { return opaque(threadIdx.x) / 32 * kWarpKeys; }

  __device__ __forceinline__ void find_page() {
    if (key_ < end_) page_ = table_[key_ / params_.page_size];
  }

  // Waits count groups of copies, so tiles after the last one are groups too. Rows without a key
  // become 0: they are still multiplied with weights of 0, and 0 * NaN is NaN.
  __device__ __forceinline__ void copy(int tile) {
    const bool live = key_ < end_;
    const int place = key_ % params_.page_size;
    const int lane = opaque(threadIdx.x) % 32;
    const int row = first_row() + lane / kRowLanes;
    const int chunk = lane % kRowLanes;
    const char* source = static_cast<const char*>(params_.cache) + chunk * 16;
    if (live) source += page_ * params_.page_stride + place * params_.token_stride;
    char* to;
    if constexpr (C::kFp8) {
      to = reinterpret_cast<char*>(&shared_.raw[tile % C::kRawTiles][row][chunk * 16]);
    } else {
      to = reinterpret_cast<char*>(chunk_of<C>(shared_.keys[tile % C::kTiles], row, chunk));
    }
#pragma unroll
    for (int first = 0; first < kRowChunks; first += kRowLanes) {
      if (first + kRowLanes <= kRowChunks || first + chunk < kRowChunks) {
        copy_async(to + first * 16, source + first * 16, live ? 16 : 0);
      }
    }
    if constexpr (C::kFp8) {
      if (params_.cache_scale_stride != 0 && chunk == 0) {
        const int64_t slot = live ? int64_t{page_} * params_.page_size + place : 0;
        copy_word_async(&shared_.raw_scale[tile % C::kRawTiles][row], params_.cache_scale + slot,
                        live ? 4 : 0);
      }
    }
    commit_copies();
    key_ += C::kKeys;
    find_page();
  }

  // Converts a lane's 16 bytes of one row in each kRowLanes chunks. Eight lanes read from and store
  // to all banks: rows are kRowBytes apart in raw tiles, a multiple of 128 bytes in key tiles.
  __device__ __forceinline__ void convert(int tile) {
    const int lane = opaque(threadIdx.x) % 32;
    const int r = (kWarpKeys == 4 ? lane / 16 * 2 : 0) + lane / 4 % 2;
    const int piece =
        (kWarpKeys == 4 ? 0 : lane / 16 * 8) +
        (lane % 4 + (lane / 4 + lane / 8) % 2 * 4 + 8 * kRowChunks - r * kRowChunks) % 8;
    const int row = first_row() + r;
    const auto& raw = shared_.raw[tile % C::kRawTiles][row];
    auto& to = shared_.keys[tile % C::kTiles];
    constexpr int kParts = C::kRank / 16 / kRowLanes;
    constexpr int kAtOnce = C::kRows == 64 ? (kParts + 1) / 2 : kParts;  // as registers allow
#pragma unroll
    for (int part = 0; part < kParts; part += kAtOnce) {
      uint4 bytes[kAtOnce];
      uint32_t scales[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int chunk = piece + (part + i) * kRowLanes;
        bytes[i] = *reinterpret_cast<const uint4*>(&raw[chunk * 16]);
        if constexpr (C::kScaled) {
          const float scale =
              kKeyFactor * reinterpret_cast<const float*>(
                               &raw[kMlaRowScaleOffset])[chunk * 16 / kMlaRowScaleGroup];
          scales[i] = pack<f16>(scale, scale);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        store_wide(to, row, piece + (part + i) * kRowLanes, bytes[i], scales[i]);
      }
    }
    constexpr int kRopeChunks = (C::kColumns - C::kRank) / (C::kScaled ? 8 : 16);
    if (piece < kRopeChunks) {
      if constexpr (C::kScaled) {
        *reinterpret_cast<uint4*>(chunk_of<C>(to, row, C::kRank / 8 + piece)) =
            bf16_as<C::kRopeMath>(
                *reinterpret_cast<const uint4*>(&raw[kMlaRowRopeOffset + piece * 16]));
      } else {
        const uint4 bytes = *reinterpret_cast<const uint4*>(&raw[C::kRank + piece * 16]);
        store_wide(to, row, C::kRank / 16 + piece, bytes, 0);
      }
    }
    if (params_.cache_scale_stride != 0 && lane < kWarpKeys) {
      const int at = first_row() + lane;
      shared_.key_scale[tile % 2][at] = shared_.raw_scale[tile % C::kRawTiles][at];
    }
  }

  // Stores the 16 values of chunk `from` of a fp8 row.
  __device__ __forceinline__ static void store_wide(
      typename C::Element (&to)[C::kKeys][C::kColumns], int row, int from, const uint4& bytes,
      uint32_t scale) {
    *reinterpret_cast<uint4*>(chunk_of<C>(to, row, 2 * from)) =
        widen_to_f16<C::kScaled>(bytes.x, bytes.y, scale);
    *reinterpret_cast<uint4*>(chunk_of<C>(to, row, 2 * from + 1)) =
        widen_to_f16<C::kScaled>(bytes.z, bytes.w, scale);
  }

  const PortableMlaParams& params_;
  typename C::SharedMemory& shared_;
  const int32_t* table_;
  int key_, end_;  // this lane's key of the next tile; end of the item
  int page_ = 0;   // page of key_
};

}  // namespace fovea::kernels::cuda
