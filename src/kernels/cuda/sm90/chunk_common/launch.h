// SPDX-License-Identifier: Apache-2.0
// Workspaces and tensor maps of kernels that compute prompts in chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gpu/tensor_map.h"
#include "kernels/cuda/common/gdn_params.h"

namespace fovea::kernels::cuda {

// Blocks for each SM of a kernel of which one runs on an SM. Several, so that SMs with short
// requests get more of them; not one for each task, because most have none in a batch of many
// decodes.
inline constexpr int32_t kStateBlocksPerSm = 8;

// Room for the chunks of a batch: the maximum of requests that are in_chunks, and of their chunks.
struct ChunkRoom {
  int32_t walks, chunks;

  ChunkRoom(int32_t min_tokens, int32_t tokens, int32_t requests)
      : walks(std::min(requests, tokens / min_tokens)), chunks(tokens / kGdnChunk + walks) {}
};

// Divides memory into arrays; only counts the bytes if it begins at null.
struct ChunkArrays {
  void* at;
  size_t bytes = 0;

  template <typename T>
  void take(T*& part, int64_t count) {
    part = at == nullptr ? nullptr : reinterpret_cast<T*>(static_cast<std::byte*>(at) + bytes);
    bytes += static_cast<size_t>(count) * sizeof(T);
  }
  void take(GdnPlan& plan, const ChunkRoom& room) {
    take(plan.walks, room.walks);
    take(plan.chunks, room.chunks);
    take(plan.counts, 1);
  }
};

// Describes the rows of tokens, of `width` elements, in boxes of a chunk.
inline void encode_rows(const void* data, int64_t width, int64_t token_stride, int32_t tokens,
                        gpu::RepeatedTensorMap& repeated, TensorMap& map) {
  repeated.encode({.data = data,
                   .rank = 2,
                   .sizes = {static_cast<uint64_t>(width), static_cast<uint64_t>(tokens)},
                   .strides = {static_cast<uint64_t>(token_stride) * sizeof(uint16_t)},
                   .box = {kGdnBoxWidth, kGdnBoxRows}},
                  &map);
}

}  // namespace fovea::kernels::cuda
