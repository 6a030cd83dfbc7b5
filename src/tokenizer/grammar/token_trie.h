// SPDX-License-Identifier: Apache-2.0
// The bytes of a vocabulary's tokens as a tree, in the order of a walk from the root: a node comes
// before its children, and a subtree is a range.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace fovea::grammar {

class TokenTrie {
 public:
  struct Node {
    uint8_t byte = 0;
    uint16_t depth = 0;   // bytes from the root
    uint32_t end = 0;     // the node after the subtree
    uint32_t tokens = 0;  // position of the first token that ends here
    uint32_t count = 0;   // number of those
  };
  static constexpr size_t kMaxTokenBytes = 1024;  // longer tokens are left out

  // `bytes` has the bytes of each token; tokens without bytes are left out.
  explicit TokenTrie(const std::vector<std::string>& bytes);

  std::span<const Node> nodes() const { return nodes_; }
  std::span<const int32_t> tokens(const Node& node) const {
    return std::span(tokens_).subspan(node.tokens, node.count);
  }
  size_t vocabulary() const { return vocabulary_; }

 private:
  std::vector<Node> nodes_;  // the first one is the root
  std::vector<int32_t> tokens_;
  size_t vocabulary_ = 0;
};

}  // namespace fovea::grammar
