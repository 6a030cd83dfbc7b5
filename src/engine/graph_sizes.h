// SPDX-License-Identifier: Apache-2.0
// The sizes of captured steps: the number of requests, their new tokens, and the bound of keys that
// they are planned for.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "core/rounding.h"

namespace fovea {

// Returns the size of the graph that serves `requests` requests, 1 to `max_size`: a power of two up
// to 8, then a multiple of 8, at most max_size.
inline int32_t graph_size(int32_t requests, int32_t max_size) {
  const auto count = static_cast<uint32_t>(requests);
  const uint32_t size = count <= 8 ? std::bit_ceil(count) : round_up(count, uint32_t{8});
  return std::min(static_cast<int32_t>(size), max_size);
}

// Returns all sizes in ascending order.
inline std::vector<int32_t> graph_sizes(int32_t max_size) {
  std::vector<int32_t> sizes;
  while (sizes.empty() || sizes.back() < max_size) {
    sizes.push_back(graph_size(sizes.empty() ? 1 : sizes.back() + 1, max_size));
  }
  return sizes;
}

// Backends have faster kernels for a small number of requests with a small number of keys, and
// select them by BatchHints::max_kv_len.
inline constexpr int32_t kShortContexts[] = {2048, 4096};
inline constexpr int32_t kMaxShortRequests = 8;

// Returns the bound of keys of the graph that serves `requests` requests (a graph_size()) of up to
// kv_len keys, 1 to `longest`.
inline int32_t graph_context(int32_t requests, int32_t kv_len, int32_t longest) {
  if (requests > kMaxShortRequests) return longest;
  for (const int32_t context : kShortContexts) {
    if (kv_len <= context && context < longest) return context;
  }
  return longest;
}

// Returns all bounds in ascending order.
inline std::vector<int32_t> graph_contexts(int32_t requests, int32_t longest) {
  std::vector<int32_t> contexts;
  while (contexts.empty() || contexts.back() < longest) {
    contexts.push_back(
        graph_context(requests, contexts.empty() ? 1 : contexts.back() + 1, longest));
  }
  return contexts;
}

// Steps that verify drafts have graphs for up to so many requests, and so many new tokens together.
inline constexpr int32_t kMaxVerifyRequests = 64;
inline constexpr int32_t kMaxVerifyTokens = 512;

// Returns the new tokens per request, 1 to max_width, of the graph that serves requests of up to
// `tokens` new ones: the last token and 0, 1, 2, 4 ... drafts, at most max_width - 1.
inline int32_t graph_width(int32_t tokens, int32_t max_width) {
  if (tokens <= 1) return 1;
  const uint32_t drafts = std::bit_ceil(static_cast<uint32_t>(tokens - 1));
  return std::min(1 + static_cast<int32_t>(drafts), max_width);
}

// Returns all widths in ascending order.
inline std::vector<int32_t> graph_widths(int32_t max_width) {
  std::vector<int32_t> widths{1};
  while (widths.back() < max_width) widths.push_back(graph_width(widths.back() + 1, max_width));
  return widths;
}

// Returns true if there is a graph for `requests` requests (a graph_size()) of `width` new tokens
// (a graph_width()) in passes of up to max_tokens tokens.
inline bool has_graph(int32_t requests, int32_t width, int32_t max_tokens) {
  if (requests * width > max_tokens) return false;
  return width == 1 || (requests <= kMaxVerifyRequests && requests * width <= kMaxVerifyTokens);
}

// Returns the rows of logits that graphs of up to max_requests requests and max_width new tokens
// need for drafts.
inline int32_t verify_rows(int32_t max_requests, int32_t max_width) {
  if (max_width == 1) return 0;
  return std::min(std::min(max_requests, kMaxVerifyRequests) * max_width, kMaxVerifyTokens);
}

// Steps with small chunks of prompts, with decodes or without, have graphs by their numbers of
// requests and tokens. Products of up to so many rows take as long as their weights are read, so
// that padding costs little.
inline constexpr int32_t kChunkRequests[] = {1, 8, 32, 128};
inline constexpr int32_t kChunkTokens[] = {16, 32, 64, 96, 128};
inline constexpr int32_t kMaxChunkTokens = 128;

struct ChunkSize {
  int32_t requests = 0, tokens = 0;
  bool operator==(const ChunkSize&) const = default;
};

// Returns the size of the graph for `requests` requests, 1 to max_requests, of `tokens` new tokens
// together, in passes of up to max_tokens tokens. Its sizes are 0 if there is none.
inline ChunkSize chunk_size(int32_t requests, int32_t tokens, int32_t max_requests,
                            int32_t max_tokens) {
  const auto* const most = std::ranges::lower_bound(kChunkRequests, requests);
  const auto* const size = std::ranges::lower_bound(kChunkTokens, tokens);
  if (most == std::end(kChunkRequests) || size == std::end(kChunkTokens)) return {};
  if (tokens > max_tokens) return {};
  return {std::min(*most, max_requests), std::min(*size, max_tokens)};
}

// Returns all sizes. A chunk has several tokens, so every pass has more tokens than requests.
inline std::vector<ChunkSize> chunk_sizes(int32_t max_requests, int32_t max_tokens) {
  std::vector<ChunkSize> sizes;
  int32_t fewer = 0;  // requests that smaller graphs serve
  for (const int32_t requests : kChunkRequests) {
    for (const int32_t usual : kChunkTokens) {
      const int32_t tokens = std::min(usual, max_tokens);
      if (tokens >= fewer + 2) sizes.push_back({std::min(requests, max_requests), tokens});
      if (usual >= max_tokens) break;
    }
    if (requests >= max_requests) break;
    fewer = requests;
  }
  return sizes;
}

}  // namespace fovea
