// SPDX-License-Identifier: Apache-2.0
// A naive model of PrefixCache: a map from whole prefixes to pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

namespace fovea {

class PrefixModel {
 public:
  using Tokens = std::vector<int32_t>;
  using Path = std::pair<int, Tokens>;  // tenant, the prefix up to the end of a page
  struct Node {
    int64_t page = 0;
    int64_t last_use = 0;
    int64_t state_use = 0;
    int32_t state = -1;
    int pins = 0;
  };

  PrefixModel(int32_t page_size, bool has_state) : page_size_(page_size), has_state_(has_state) {}

  const std::map<Path, Node>& nodes() const { return nodes_; }

  // Returns the pages of the longest prefix within `limit` tokens, and the snapshot at its end.
  std::pair<std::vector<int64_t>, int32_t> match(int tenant, const Tokens& tokens, int32_t limit) {
    const std::vector<Path> path = cached(tenant, tokens, limit);
    std::vector<int64_t> pages;
    for (const Path& prefix : path) pages.push_back(nodes_[prefix].page);
    if (path.empty()) return {pages, -1};
    touch(path);
    Node& last = nodes_[path.back()];
    if (last.state >= 0) last.state_use = ++now_;
    return {pages, last.state};
  }

  void insert(int tenant, const Tokens& tokens, std::span<const int64_t> pages, int32_t state) {
    std::vector<Path> path;
    for (size_t i = 0; (i + 1) * page_size_ <= tokens.size(); ++i) {
      path.push_back(prefix(tenant, tokens, i));
      nodes_.try_emplace(path.back(), Node{.page = pages[i]});
    }
    if (path.empty()) return;
    touch(path);
    if (state < 0) return;
    Node& last = nodes_[path.back()];
    if (last.state < 0) last.state = state;
    last.state_use = ++now_;
  }

  // `references(page)` returns the number of owners besides the tree.
  template <typename References>
  std::vector<int64_t> evict(int64_t count, References references) {
    std::vector<int64_t> freed;
    while (static_cast<int64_t>(freed.size()) < count) {
      auto oldest = nodes_.end();
      for (auto node = nodes_.begin(); node != nodes_.end(); ++node) {
        if (!is_leaf(node) || node->second.pins > 0 || references(node->second.page) > 0) continue;
        if (oldest == nodes_.end() || node->second.last_use < oldest->second.last_use) {
          oldest = node;
        }
      }
      if (oldest == nodes_.end()) break;
      freed.push_back(oldest->second.page);
      nodes_.erase(oldest);
    }
    return freed;
  }

  bool evict_state() {
    Node* oldest = nullptr;
    for (auto& [path, node] : nodes_) {
      if (node.state < 0 || node.pins > 0) continue;
      if (oldest == nullptr || node.state_use < oldest->state_use) oldest = &node;
    }
    if (oldest == nullptr) return false;
    oldest->state = -1;
    return true;
  }

  int32_t pin(int tenant, const Tokens& tokens) {
    const std::vector<Path> path = cached(tenant, tokens, static_cast<int32_t>(tokens.size()));
    if (path.empty()) return 0;
    ++nodes_[path.back()].pins;
    return static_cast<int32_t>(path.back().second.size());
  }

  bool unpin(int tenant, const Tokens& tokens) {
    const std::vector<Path> path = cached(tenant, tokens, static_cast<int32_t>(tokens.size()));
    for (auto prefix = path.rbegin(); prefix != path.rend(); ++prefix) {
      Node& node = nodes_[*prefix];
      if (node.pins == 0) continue;
      --node.pins;
      return true;
    }
    return false;
  }

 private:
  Path prefix(int tenant, const Tokens& tokens, size_t page) const {
    return {tenant, Tokens(tokens.begin(), tokens.begin() + (page + 1) * page_size_)};
  }

  std::vector<Path> cached(int tenant, const Tokens& tokens, int32_t limit) const {
    const auto length = std::min(tokens.size(), static_cast<size_t>(limit));
    std::vector<Path> path;
    for (size_t i = 0; (i + 1) * page_size_ <= length; ++i) {
      Path next = prefix(tenant, tokens, i);
      if (!nodes_.contains(next)) break;
      path.push_back(std::move(next));
    }
    while (has_state_ && !path.empty() && nodes_.at(path.back()).state < 0) path.pop_back();
    return path;
  }

  void touch(const std::vector<Path>& path) {
    ++now_;
    for (const Path& prefix : path) nodes_[prefix].last_use = now_;
  }

  // Prefixes sort directly before their continuations.
  bool is_leaf(std::map<Path, Node>::const_iterator node) const {
    const auto next = std::next(node);
    if (next == nodes_.end() || next->first.first != node->first.first) return true;
    const Tokens& tokens = node->first.second;
    const Tokens& longer = next->first.second;
    return longer.size() <= tokens.size() ||
           !std::equal(tokens.begin(), tokens.end(), longer.begin());
  }

  int32_t page_size_;
  bool has_state_;
  int64_t now_ = 0;
  std::map<Path, Node> nodes_;
};

}  // namespace fovea
