// SPDX-License-Identifier: Apache-2.0
// What blocks of 16 or 32 query rows over fp8 caches have in shared memory, and how it gets there.
#pragma once

#include "kernels/cuda/sm90/mla_decode/load_fp8.cuh"
#include "kernels/cuda/sm90/mla_decode/mainloop.cuh"

namespace fovea::kernels::cuda {

// Rows of an item's key tiles to the ring, runs of them at once where a page holds them side by
// side. One warp.
template <class C>
__device__ __forceinline__ void copy_fp8_rows(const MlaDecodeParams& params,
                                              typename C::SharedMemory& shared) {
  Ring<C::kStages> ring;
  TileReader<C> reader;
  const int lane = threadIdx.x % 32;
  const int page_run = params.page_size & -params.page_size;  // its largest power of two
  const int run = params.token_stride == C::kRowBytes ? min(page_run, kTileKeys) : 1;
  while (true) {
    const RowTile& tile = reader.take(shared);
    const KeySpan span = {tile.item.request, tile.item.key_begin, tile.item.key_end};
    const int tiles = tile.tiles;
    reader.give_back(shared);
    if (tiles < 0) return;
    const int32_t* table = params.page_table + span.request * params.page_table_stride;
    const char* from[2];  // of this lane's runs
    int keys[2];          // in them
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
      if (lane == 0) full.arrive_expecting(min(span.key_end - key, kTileKeys) * C::kRowBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (keys[i] == 0) continue;
        load_bytes(shared.kv[ring.stage].rows[(lane + 32 * i) * run], from[i],
                   keys[i] * C::kRowBytes, full, kEvictFirst);
      }
      find(key + kTileKeys);
      ring.advance();
    }
  }
}

// Queries in the order of columns in which lanes read keys: of each 64, lane q % 4 has 16 q to 16 q
// + 15 and gives four of them to each product. As they are multiplied. Both warpgroups.
template <class C>
__device__ __forceinline__ void arrange_queries(typename C::SharedMemory& shared) {
  for (int i = threadIdx.x - kWarpgroupThreads; i < C::kQueryTiles * C::kRows;
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
  named_barrier_wait(1, 2 * kWarpgroupThreads);
}

// Rows that no key of the item owns become zeros: values times a weight of 0 must not be NaN.
template <class C>
__device__ __forceinline__ void clear_foreign_rows(typename C::KeyRows& keys, int valid,
                                                   int group) {
  uint4* first = keys.rows[valid];
  for (int i = threadIdx.x % kWarpgroupThreads; i < (kTileKeys - valid) * (C::kRowBytes / 16);
       i += kWarpgroupThreads) {
    first[i] = {};
  }
  fence_async_proxy();
  named_barrier_wait(2 + group, kWarpgroupThreads);
}

}  // namespace fovea::kernels::cuda
