// SPDX-License-Identifier: Apache-2.0
// A pushdown automaton over bytes: rules are graphs of nodes, and a node may call a rule, also its
// own. Graphs are built from their end to their beginning: each function returns the node from
// which its text leads to `next`.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace fovea::grammar {

constexpr int32_t kNone = -1;

struct Edge {
  uint8_t low = 0, high = 0;
  int32_t target = 0;
};

struct Node {
  std::vector<Edge> edges = {};
  std::vector<int32_t> free = {};  // targets that need no byte
  int32_t call = kNone;            // the first node of a rule; `after` follows it
  int32_t after = kNone;
  bool bounded = false;  // the call closes a circle of rules, so the depth of calls must end it
  bool ends = false;     // the rule may end here
};

class Automaton {
 public:
  static constexpr size_t kMaxNodes = 300'000;

  const Node& node(int32_t index) const { return nodes_[static_cast<size_t>(index)]; }
  size_t size() const { return nodes_.size(); }

  // Throws Error{invalid_argument} beyond kMaxNodes.
  int32_t add(Node node);
  int32_t end() { return add({.ends = true}); }
  int32_t dead() { return add({}); }  // no text leads on
  int32_t bytes(uint8_t low, uint8_t high, int32_t next) {
    return add({.edges = {{low, high, next}}});
  }
  int32_t text(std::string_view text, int32_t next);
  int32_t any_of(std::vector<int32_t> choices) { return add({.free = std::move(choices)}); }
  int32_t call(int32_t rule, int32_t next, bool bounded = false) {
    return add({.call = rule, .after = next, .bounded = bounded});
  }
  // Replaces a node that other nodes may already name, to close a loop.
  void set(int32_t index, Node node) { nodes_[static_cast<size_t>(index)] = std::move(node); }

  // Removes edges, targets and calls from which no text leads to the end of their rule.
  void prune();

 private:
  bool leads_on(const Node& node, const std::vector<bool>& good) const;

  std::vector<Node> nodes_;
};

}  // namespace fovea::grammar
