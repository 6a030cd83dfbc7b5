// SPDX-License-Identifier: Apache-2.0
// Which passes on a GPU are padded to a size that is captured as a graph, and to which.
#pragma once

#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "engine/graph_sizes.h"
#include "engine/model_runner.h"
#include "engine/pass_arrays.h"
#include "engine/shared_prefixes.h"

namespace fovea {

struct PaddedPassOptions {
  BatchLimits limits;
  int32_t max_requests = 0;  // in a padded pass; 0: none is padded
  int32_t max_width = 1;     // max new tokens of a request in a padded pass without prompts
  int32_t logit_rows = 1;    // max rows of logits of such a pass
  bool chunks = false;       // passes with small chunks of prompts are padded
  bool draws = false;        // passes draw their tokens
  // Passes with several new tokens of a request name slots of states, or drafts that states keep.
  bool snapshots = false, kept_drafts = false;
  bool trees = false;  // passes with several new tokens of a request have a tree mask
};

class PaddedPasses {
 public:
  // Copies `prefixes`.
  PaddedPasses(const PaddedPassOptions& options, const SharedPrefixes& prefixes)
      : options_(options), prefixes_(prefixes) {}

  // Returns all sizes. Their keys differ.
  std::vector<PassSize> sizes() const;
  // Mode, requests, tokens, logit_rows, max_kv_len, shares_prefixes.
  using Key = std::tuple<ForwardMode, int32_t, int32_t, int32_t, int32_t, bool>;
  static Key key_of(const PassSize& padded) {
    return {padded.mode,       padded.requests,   padded.tokens,
            padded.logit_rows, padded.max_kv_len, padded.shares_prefixes};
  }
  // Returns the size for the pass with these parts, filled to `size`, if it is padded.
  std::optional<PassSize> find(std::span<const PassPart> parts, const PassSize& size) const;
  static bool has_chunks(const PassSize& padded) { return padded.mode == ForwardMode::mixed; }
  // Returns the member for graphs of this size.
  static GraphCount& count_of(const PassSize& padded, EngineGraphs& graphs) {
    if (has_chunks(padded)) return graphs.chunks;
    if (padded.max_q_len > 1) return graphs.drafts;
    return padded.shares_prefixes ? graphs.shared_prefixes : graphs.decodes;
  }

 private:
  // Returns the size for up to that many requests, of up to q_len new tokens and kv_len keys each.
  PassSize of_decodes(int32_t requests, int32_t q_len, int32_t kv_len, bool shares_prefixes) const;
  PassSize of_chunks(const ChunkSize& chunk) const;
  bool has_verification(const PassSize& size) const;

  PaddedPassOptions options_;
  SharedPrefixes prefixes_;
};

}  // namespace fovea
