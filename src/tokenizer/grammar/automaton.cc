// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/grammar/automaton.h"

#include <algorithm>

#include "core/check.h"

namespace fovea::grammar {

int32_t Automaton::add(Node node) {
  check_argument(nodes_.size() < kMaxNodes, "json_schema: its automaton has more than {} states",
                 kMaxNodes);
  nodes_.push_back(std::move(node));
  return static_cast<int32_t>(nodes_.size()) - 1;
}

int32_t Automaton::text(std::string_view text, int32_t next) {
  for (auto byte = text.rbegin(); byte != text.rend(); ++byte)
    next = bytes(static_cast<uint8_t>(*byte), static_cast<uint8_t>(*byte), next);
  return next;
}

bool Automaton::leads_on(const Node& node, const std::vector<bool>& good) const {
  const auto is_good = [&](int32_t target) { return good[static_cast<size_t>(target)]; };
  if (node.ends || std::ranges::any_of(node.free, is_good)) return true;
  if (std::ranges::any_of(node.edges, [&](const Edge& edge) { return is_good(edge.target); }))
    return true;
  return node.call != kNone && is_good(node.call) && is_good(node.after);
}

void Automaton::prune() {
  // Targets were mostly added before the nodes that name them, so few rounds are needed.
  std::vector<bool> good(nodes_.size());
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (good[i] || !leads_on(nodes_[i], good)) continue;
      good[i] = changed = true;
    }
  }
  const auto is_bad = [&](int32_t target) { return !good[static_cast<size_t>(target)]; };
  for (Node& node : nodes_) {
    std::erase_if(node.free, is_bad);
    std::erase_if(node.edges, [&](const Edge& edge) { return is_bad(edge.target); });
    if (node.call != kNone && (is_bad(node.call) || is_bad(node.after))) node.call = kNone;
  }
}

}  // namespace fovea::grammar
