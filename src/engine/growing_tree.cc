// SPDX-License-Identifier: Apache-2.0
#include "engine/growing_tree.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace fovea {
namespace {

// Steps after the first one. Later ones add few drafts that are right, and each is a pass.
constexpr int32_t kMaxSteps = 5;

}  // namespace

GrowingTree::GrowingTree(int32_t last_token, int32_t wanted, int32_t branches, int32_t room)
    : wanted_(wanted),
      branches_(branches),
      room_(std::min(wanted, room)),
      steps_left_(std::min(wanted - 1, kMaxSteps)) {
  nodes_.push_back({.token = last_token});
  compute(0);
}

void GrowingTree::compute(int32_t node) {
  Node& added = nodes_[static_cast<size_t>(node)];
  added.place = static_cast<int32_t>(computed_.size());
  computed_.push_back(node);
  tokens_.push_back(added.token);
  parents_.push_back(added.parent < 0 ? -1 : nodes_[static_cast<size_t>(added.parent)].place);
}

std::vector<int32_t> GrowingTree::best() const {
  std::vector<int32_t> order(nodes_.size() - 1);
  std::iota(order.begin(), order.end(), 1);
  const size_t count = std::min(order.size(), static_cast<size_t>(wanted_));
  std::partial_sort(order.begin(), order.begin() + static_cast<int64_t>(count), order.end(),
                    [&](int32_t a, int32_t b) {
                      const double left = nodes_[static_cast<size_t>(a)].score;
                      const double right = nodes_[static_cast<size_t>(b)].score;
                      return left != right ? left > right : a < b;
                    });
  order.resize(count);
  return order;
}

bool GrowingTree::choose() {
  chosen_ = 0;
  if (steps_left_-- <= 0) return false;
  std::vector<int32_t> nodes = best();
  // Children of the last of all that are wanted cannot be among them.
  if (nodes.size() == static_cast<size_t>(wanted_)) nodes.pop_back();
  for (const int32_t node : nodes) {
    const bool full = static_cast<int32_t>(computed_.size()) > room_;
    if (chosen_ == branches_ || full) break;
    if (nodes_[static_cast<size_t>(node)].place >= 0) continue;
    compute(node);
    ++chosen_;
  }
  return chosen_ > 0;
}

void GrowingTree::add_children(int32_t place, const SampledToken& drawn) {
  const int32_t parent = computed_[static_cast<size_t>(place)];
  const double score = nodes_[static_cast<size_t>(parent)].score;
  size_t rank = 0;
  const auto add = [&](int32_t token) {
    if (rank == drawn.top.size() || !std::isfinite(drawn.top[rank].logprob)) return;
    nodes_.push_back(
        {.token = token, .parent = parent, .score = score + drawn.top[rank++].logprob});
  };
  add(drawn.token);
  for (const TokenLogprob& other : drawn.top) {
    if (other.token != drawn.token) add(other.token);
  }
}

DraftTree GrowingTree::finish() const {
  DraftTree tree;
  tree.begin(nodes_.front().token);
  tree.parents.assign(1, -1);
  std::vector<int32_t> places(nodes_.size());
  for (const int32_t node : best()) {
    const Node& draft = nodes_[static_cast<size_t>(node)];
    places[static_cast<size_t>(node)] = static_cast<int32_t>(tree.tokens.size());
    tree.tokens.push_back(draft.token);
    tree.parents.push_back(places[static_cast<size_t>(draft.parent)]);
  }
  return tree;
}

}  // namespace fovea
