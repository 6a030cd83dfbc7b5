// SPDX-License-Identifier: Apache-2.0
// How keys reach shared memory and queries their order there.
#pragma once

#include "kernels/cuda/sm90/mla_common/masks.cuh"
#include "kernels/cuda/sm90/mla_common/queries.cuh"
#include "kernels/cuda/sm90/mla_decode_fp8_narrow/config.cuh"

namespace fovea::kernels::cuda {

// Loads the rows of an item's key tiles to the ring, in runs that a page holds next to each other.
// One warp.
template <class C>
__device__ __forceinline__ void load_rows(const MlaDecodeParams& params,
                                          typename C::SharedMemory& shared) {
  constexpr int kRowBytes = C::Row::kBytes;
  Ring<C::kStages> ring;
  TileReader<C> reader;
  const int lane = threadIdx.x % 32;
  const int page_run = params.page_size & -params.page_size;  // its largest power of two
  const int run = params.token_stride == kRowBytes ? min(page_run, kTileKeys) : 1;
  while (true) {
    const RowTile& tile = reader.take(shared);
    const KeySpan span = {tile.item.request, tile.item.key_begin, tile.item.key_end};
    const int tiles = tile.tiles;
    reader.give_back(shared);
    if (tiles < 0) return;
    const int32_t* table = params.page_table.pages + span.request * params.page_table.stride;
    const char* from[2];  // this lane's runs
    int keys[2];          // keys of each run
    const auto find = [&](int key) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = key + (lane + 32 * i) * run;
        keys[i] = (lane + 32 * i) * run < kTileKeys ? min(max(span.key_end - at, 0), run) : 0;
        if (keys[i] == 0) continue;
        from[i] = static_cast<const char*>(params.cache) +
                  table[at / params.page_size] * params.page_stride +
                  at % params.page_size * params.token_stride;
      }
    };
    find(span.key_begin);
    for (int key = span.key_begin; key < span.key_end; key += kTileKeys) {
      TransactionBarrier& full = shared.full[ring.stage];
      shared.empty[ring.stage].wait(ring.phase ^ 1);
      if (lane == 0) full.arrive_expecting(min(span.key_end - key, kTileKeys) * kRowBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (keys[i] == 0) continue;
        load_bytes(shared.kv[ring.stage].rows[(lane + 32 * i) * run], from[i], keys[i] * kRowBytes,
                   full, kEvictFirst);
      }
      find(key + kTileKeys);
      ring.advance();
    }
  }
}

// Arranges queries in the order in which lanes read the columns of keys: of each 64 columns, lane
// l % 4 has 16 l to 16 l + 15 and gives four of them to each product. Also converts them to the
// operand type. Both warpgroups.
template <class C>
__device__ __forceinline__ void arrange_queries(typename C::SharedMemory& shared) {
  for (int i = threadIdx.x - kWarpgroupThreads; i < C::kQueries.shared_tiles * C::kRows;
       i += 2 * kWarpgroupThreads) {
    const int tile = i / C::kRows;
    const int row = i % C::kRows;
    uint32_t words[32];
    uint4* chunks = reinterpret_cast<uint4*>(shared.q[tile][row]);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      *reinterpret_cast<uint4*>(words + 4 * c) = chunks[c ^ row % 8];
    }
    if (tile < C::kLatentTiles ? !kPlainQueries<C> : C::kRopeMath != C::kQ) {
#pragma unroll
      for (uint32_t& word : words) word = query_pair<C>(word);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {  // half c % 2 of product c / 2
      chunks[c ^ row % 8] = {words[c], words[8 + c], words[16 + c], words[24 + c]};
    }
  }
  fence_async_proxy();
  sync_warpgroups();
}

// Clears the rows after the first `valid` keys, which no key of the item owns: values times a
// weight of 0 must not be NaN. One warpgroup.
template <class C>
__device__ __forceinline__ void clear_unowned_rows(typename C::KeyRows& keys, int valid,
                                                   int group) {
  uint4* first = keys.rows[valid];
  for (int i = threadIdx.x % kWarpgroupThreads; i < (kTileKeys - valid) * (C::Row::kBytes / 16);
       i += kWarpgroupThreads) {
    first[i] = {};
  }
  fence_async_proxy();
  sync_warpgroup(group);
}

}  // namespace fovea::kernels::cuda
