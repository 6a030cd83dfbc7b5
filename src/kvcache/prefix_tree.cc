// SPDX-License-Identifier: Apache-2.0
#include "kvcache/prefix_tree.h"

#include <algorithm>
#include <cstring>

namespace fovea {

size_t PrefixTree::KeyHash::operator()(const PrefixKey& key) const {
  size_t hash;
  std::memcpy(&hash, key.data(), sizeof(hash));
  return hash;
}

template <typename Change>
void PrefixTree::update(int32_t index, Change change) {
  Node& node = at(index);
  if (is_listed(node)) leaves_.erase({node.last_use, index});
  change(node);
  if (is_listed(node)) leaves_.insert({node.last_use, index});
}

int32_t PrefixTree::find_root(const PrefixDomain& domain) {
  const std::string serialised = serialise(domain);
  const auto found = by_key_.find(hash_domain(hash_, serialised));
  if (found == by_key_.end()) return -1;
  const auto root = domains_.find(found->second);
  return root != domains_.end() && root->second == serialised ? found->second : -1;
}

int32_t PrefixTree::find_child(int32_t parent, std::span<const int32_t> tokens) {
  const auto found = by_key_.find(page_key_(hash_, node(parent).key, tokens));
  if (found == by_key_.end() || node(found->second).parent != parent) return -1;
  const auto stored = tokens_.begin() + int64_t{found->second} * page_size_;
  return std::equal(tokens.begin(), tokens.end(), stored) ? found->second : -1;
}

int32_t PrefixTree::add(const PrefixKey& key) {
  if (by_key_.contains(key)) return -1;
  int32_t index;
  if (unused_.empty()) {
    index = static_cast<int32_t>(nodes_.size());
    nodes_.emplace_back();
    tokens_.resize(nodes_.size() * static_cast<size_t>(page_size_));
  } else {
    index = unused_.back();
    unused_.pop_back();
  }
  at(index).key = key;
  at(index).last_use = now_;
  by_key_.emplace(key, index);
  return index;
}

int32_t PrefixTree::add_root(const PrefixDomain& domain) {
  const int32_t existing = find_root(domain);
  if (existing >= 0) return existing;
  std::string serialised = serialise(domain);
  const int32_t index = add(hash_domain(hash_, serialised));
  if (index >= 0) domains_.emplace(index, std::move(serialised));
  return index;
}

int32_t PrefixTree::add_child(int32_t parent, std::span<const int32_t> tokens, int64_t page) {
  const int32_t index = add(page_key_(hash_, node(parent).key, tokens));
  if (index < 0) return -1;
  std::ranges::copy(tokens, tokens_.begin() + int64_t{index} * page_size_);
  update(parent, [](Node& node) { ++node.children; });
  update(index, [&](Node& node) {
    node.parent = parent;
    node.page = page;
  });
  return index;
}

void PrefixTree::remove(int32_t index) {
  set_state(index, -1);
  update(index, [](Node& node) { node.page = 0; });
  by_key_.erase(node(index).key);
  domains_.erase(index);
  at(index) = Node{};
  unused_.push_back(index);
}

void PrefixTree::remove_leaf(int32_t index) {
  const int32_t parent = node(index).parent;
  remove(index);
  update(parent, [](Node& node) { --node.children; });
  if (node(parent).page == 0 && node(parent).children == 0) remove(parent);
}

void PrefixTree::touch(int32_t index) {
  ++now_;
  for (; index >= 0; index = node(index).parent) {
    update(index, [&](Node& node) { node.last_use = now_; });
  }
}

void PrefixTree::pin(int32_t index, int32_t change) {
  update(index, [&](Node& node) { node.pins += change; });
}

void PrefixTree::set_state(int32_t index, int32_t slot) {
  Node& node = at(index);
  if (node.state_slot >= 0) states_.erase({node.state_use, index});
  node.state_slot = slot;
  if (slot < 0) return;
  node.state_use = ++now_;
  states_.insert({node.state_use, index});
}

void PrefixTree::touch_state(int32_t index) { set_state(index, node(index).state_slot); }

}  // namespace fovea
