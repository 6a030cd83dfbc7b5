// SPDX-License-Identifier: Apache-2.0
#include "kvcache/prefix_tree.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fovea {

size_t PrefixTree::KeyHash::operator()(const PrefixKey& key) const {
  size_t hash;
  std::memcpy(&hash, key.data(), sizeof(hash));
  return hash;
}

PrefixTree::Order::node_type PrefixTree::new_entry() {
  Order one = {{0, 0}};
  return one.extract(one.begin());
}

void PrefixTree::list(int32_t index, Order::node_type entry) {
  if (!is_listed(node(index))) return;
  entry.value() = {node(index).last_use, index};
  leaves_.insert(std::move(entry));
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
  if (unused_.empty()) {
    if (nodes_.size() == nodes_.capacity()) nodes_.reserve(std::max<size_t>(2 * nodes_.size(), 16));
    unused_.reserve(nodes_.capacity());  // so that remove() cannot fail
    tokens_.resize((nodes_.size() + 1) * static_cast<size_t>(page_size_));
    unused_.push_back(static_cast<int32_t>(nodes_.size()));
    nodes_.emplace_back();
  }
  const int32_t index = unused_.back();
  if (!by_key_.try_emplace(key, index).second) return -1;
  unused_.pop_back();
  at(index).key = key;
  at(index).last_use = now_;
  return index;
}

int32_t PrefixTree::add_root(const PrefixDomain& domain) {
  const int32_t existing = find_root(domain);
  if (existing >= 0) return existing;
  std::string serialised = serialise(domain);
  const int32_t index = add(hash_domain(hash_, serialised));
  if (index < 0) return -1;
  try {
    domains_.emplace(index, std::move(serialised));
  } catch (...) {
    remove(index);
    throw;
  }
  return index;
}

int32_t PrefixTree::add_child(int32_t parent, std::span<const int32_t> tokens, int64_t page) {
  Order::node_type entry = new_entry();
  const int32_t index = add(page_key_(hash_, node(parent).key, tokens));
  if (index < 0) return -1;
  std::ranges::copy(tokens, tokens_.begin() + int64_t{index} * page_size_);
  leaves_.erase({node(parent).last_use, parent});
  ++at(parent).children;
  at(index).parent = parent;
  at(index).page = page;
  // touch() sets it later, if it is called: a page is never used later than its parent.
  at(index).last_use = node(parent).last_use;
  list(index, std::move(entry));
  return index;
}

void PrefixTree::remove(int32_t index) {
  set_state(index, -1);
  by_key_.erase(node(index).key);
  domains_.erase(index);
  at(index) = Node{};
  unused_.push_back(index);
}

void PrefixTree::remove_leaf(int32_t index) {
  const int32_t parent = node(index).parent;
  Order::node_type entry = leaves_.extract({node(index).last_use, index});
  remove(index);
  if (--at(parent).children == 0) list(parent, std::move(entry));
  if (node(parent).page == 0 && node(parent).children == 0) remove(parent);
}

void PrefixTree::touch(int32_t index) {
  ++now_;
  for (; index >= 0; index = node(index).parent) {
    Order::node_type entry;
    if (is_listed(node(index))) entry = leaves_.extract({node(index).last_use, index});
    at(index).last_use = now_;
    list(index, std::move(entry));
  }
}

void PrefixTree::pin(int32_t index, int32_t change) {
  Order::node_type entry = new_entry();
  leaves_.erase({node(index).last_use, index});
  at(index).pins += change;
  list(index, std::move(entry));
}

void PrefixTree::set_state(int32_t index, int32_t slot) {
  Node& node = at(index);
  if (slot >= 0) states_.insert({now_ + 1, index});
  if (node.state_slot >= 0) states_.erase({node.state_use, index});
  node.state_slot = slot;
  if (slot >= 0) node.state_use = ++now_;
}

void PrefixTree::touch_state(int32_t index) {
  Order::node_type entry = states_.extract({node(index).state_use, index});
  at(index).state_use = ++now_;
  entry.value() = {node(index).state_use, index};
  states_.insert(std::move(entry));
}

}  // namespace fovea
