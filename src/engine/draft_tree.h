// SPDX-License-Identifier: Apache-2.0
// The drafts of one request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fovea {

// Node 0 is the request's last token, the others are drafts. A node stands after its parent.
struct DraftTree {
  static constexpr int32_t kUnknown = -1;  // equals no token

  std::vector<int32_t> tokens;
  std::vector<int32_t> parents;  // an earlier node, -1 for node 0; empty: the node before (a chain)

  // If not negative, the last draft is kUnknown until this draw of the drafter's last pass gives
  // it.
  int32_t drawn_by = -1;

  int32_t drafts() const { return static_cast<int32_t>(tokens.size()) - 1; }
  void begin(int32_t last_token) {
    tokens.assign(1, last_token);
    parents.clear();
    drawn_by = -1;
  }
  // Keeps the first `kept` drafts.
  void keep(int32_t kept) {
    if (kept < drafts()) drawn_by = -1;
    tokens.resize(1 + static_cast<size_t>(kept));
    if (!parents.empty()) parents.resize(tokens.size());
  }
  int32_t parent(int32_t node) const {
    return parents.empty() ? node - 1 : parents[static_cast<size_t>(node)];
  }
  // Returns the draft after `node` that is this token, -1 if there is none.
  int32_t find(int32_t node, int32_t token) const {
    for (int32_t next = node + 1; next <= drafts(); ++next) {
      if (parent(next) == node && tokens[static_cast<size_t>(next)] == token) return next;
    }
    return -1;
  }
};

}  // namespace fovea
