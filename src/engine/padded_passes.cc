// SPDX-License-Identifier: Apache-2.0
#include "engine/padded_passes.h"

#include <algorithm>

namespace fovea {

PassSize PaddedPasses::of_decodes(int32_t requests, int32_t q_len, int32_t kv_len,
                                  bool shares_prefixes) const {
  PassSize size;
  size.requests = graph_size(requests, options_.max_requests);
  size.max_q_len = graph_width(q_len, options_.max_width);
  size.tokens = size.logit_rows = size.draw_count = size.requests * size.max_q_len;
  size.shares_prefixes = shares_prefixes;
  size.snapshots = options_.snapshots && size.max_q_len > 1;
  size.kept_drafts = options_.kept_drafts && size.max_q_len > 1;
  size.trees = options_.trees && size.max_q_len > 1;
  size.max_kv_len = graph_context(size.requests, kv_len, options_.limits.max_kv_len);
  size.mode = size.max_q_len == 1 ? ForwardMode::decode : ForwardMode::extend;
  size.draws = options_.draws;
  size.padded = true;
  return size;
}

// One size serves any division of the tokens among the requests.
PassSize PaddedPasses::of_chunks(const ChunkSize& chunk) const {
  PassSize size;
  size.requests = chunk.requests;
  size.tokens = chunk.tokens;
  size.logit_rows = size.draw_count = std::min(chunk.requests, chunk.tokens);
  size.max_q_len = std::min(chunk.tokens, options_.limits.max_q_len);
  size.max_kv_len = options_.limits.max_kv_len;
  size.mode = ForwardMode::mixed;
  size.draws = options_.draws;
  size.padded = true;
  return size;
}

std::vector<PassSize> PaddedPasses::sizes() const {
  std::vector<PassSize> sizes;
  if (options_.max_requests == 0) return sizes;
  const int32_t max_tokens = std::min(options_.limits.max_tokens, options_.logit_rows);
  for (const int32_t requests : graph_sizes(options_.max_requests)) {
    for (const int32_t context : graph_contexts(requests, options_.limits.max_kv_len)) {
      for (const int32_t width : graph_widths(options_.max_width)) {
        if (has_graph(requests, width, max_tokens)) {
          sizes.push_back(of_decodes(requests, width, context, false));
        }
      }
      if (prefixes_.possible(requests, context)) {
        sizes.push_back(of_decodes(requests, 1, context, true));
      }
    }
  }
  if (options_.chunks) {
    for (const ChunkSize& chunk : chunk_sizes(options_.max_requests, options_.limits.max_tokens)) {
      sizes.push_back(of_chunks(chunk));
    }
  }
  return sizes;
}

// Passes with drafts share prefixes in no padded size: otherwise they read them once.
bool PaddedPasses::has_verification(const PassSize& size) const {
  return size.max_q_len > 1 && size.max_q_len <= options_.max_width && !size.shares_prefixes &&
         has_graph(graph_size(size.requests, options_.max_requests),
                   graph_width(size.max_q_len, options_.max_width),
                   std::min(options_.limits.max_tokens, options_.logit_rows));
}

std::optional<PassSize> PaddedPasses::find(std::span<const PassPart> parts,
                                           const PassSize& size) const {
  if (size.requests > options_.max_requests) return std::nullopt;
  const auto [fewest, most] = std::ranges::minmax(parts, {}, &PassPart::logit_rows);
  const bool decodes = size.max_q_len == 1 && fewest.logit_rows == 1 && most.logit_rows == 1;
  if (decodes || has_verification(size)) {
    return of_decodes(size.requests, size.max_q_len, size.max_kv_len, size.shares_prefixes);
  }
  if (!options_.chunks || most.logit_rows > 1 || size.shares_prefixes) return std::nullopt;
  const ChunkSize chunk =
      chunk_size(size.requests, size.tokens, options_.max_requests, options_.limits.max_tokens);
  if (chunk.requests == 0) return std::nullopt;
  return of_chunks(chunk);
}

}  // namespace fovea
