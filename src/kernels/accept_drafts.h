// SPDX-License-Identifier: Apache-2.0
// Acceptance of drafts, by one thread of a CPU or by a block of a GPU.
#pragma once

#include "kernels/drafts.h"

namespace fovea::kernels {

// Writes the path of one request as it grows. One thread writes.
class AcceptedPath {
 public:
  AcceptedPath(const DraftTrees& trees, const AcceptedNodes& to, int32_t request, bool writes)
      : trees_(trees),
        to_(to),
        request_(request),
        first_(static_cast<int64_t>(request) * trees.width),
        writes_(writes) {}

  int32_t count() const { return count_; }
  void add(int32_t node) {
    if (count_ > 0) put_token(count_ - 1, trees_.tokens[first_ + node]);
    if (writes_ && to_.nodes != nullptr) to_.nodes[first_ + count_] = node;
    ++count_;
  }
  // Ends the path with the token that follows it; -1 with an empty path: padding.
  void end(int32_t bonus) {
    if (count_ > 0) put_token(count_ - 1, bonus);
    for (int32_t i = count_; i < trees_.width; ++i) {
      put_token(i, -1);
      if (writes_ && to_.nodes != nullptr) to_.nodes[first_ + i] = -1;
    }
    if (!writes_) return;
    if (to_.counts != nullptr) to_.counts[request_] = count_;
    if (to_.bonus != nullptr) to_.bonus[request_] = bonus;
  }

 private:
  void put_token(int32_t i, int32_t token) {
    if (writes_ && to_.tokens != nullptr) to_.tokens[first_ + i] = token;
  }

  const DraftTrees& trees_;
  const AcceptedNodes& to_;
  int32_t request_;
  int64_t first_;
  bool writes_;
  int32_t count_ = 0;
};

// The model's distribution p after rejections. Round k rejected tokens[k], which was drawn
// from q without the tokens of earlier rounds; then p becomes max(p - q, 0), normalised.
struct Residual {
  int32_t rounds;
  int32_t drawn;  // 0: the tokens were not drawn, q is 1 at tokens[k] and 0 elsewhere
  int32_t tokens[kMaxNodes];
  double p_scale[kMaxNodes], q_scale[kMaxNodes];  // make sums 1
};

// Returns p of a token after all rounds.
inline double residual_at(const Residual& residual, float p, float q, int32_t token) {
  double left = p;
  bool removed = false;
  for (int32_t k = 0; k < residual.rounds; ++k) {
    const bool rejected = residual.tokens[k] == token;
    const double proposed = !residual.drawn ? (rejected ? 1.0 : 0.0)
                            : removed       ? 0.0
                                            : q * residual.q_scale[k];
    left = left > proposed ? (left - proposed) * residual.p_scale[k] : 0.0;
    removed |= rejected;
  }
  return left;
}

// Walks down the tree of one request. Block gives sums over the vocabulary:
//   Residual& residual()                      shared by its threads
//   bool leads(), void wait()                 one thread writes; all see it after wait()
//   double sum(p, q)                          of the residual of two rows
//   bool is_last(p, q)                        true in one of several blocks, which draws the token
//   int32_t draw(p, q, uniform)               a token of the residual; -1 if its sum is not
//   positive
template <typename Block>
void accept_sampled(const AcceptSampledParams& params, int32_t request, Block& block) {
  const DraftTrees& trees = params.trees;
  AcceptedPath path(trees, params.accepted, request, block.leads());
  if (trees.lens[request] < 0) return path.end(-1);
  const int64_t first = static_cast<int64_t>(request) * trees.width;
  const uint64_t seed = params.seeds[request];
  Residual& residual = block.residual();
  for (int32_t node = 0;;) {
    path.add(node);
    const uint64_t position = static_cast<uint64_t>(trees.lens[request]) + path.count();
    const float* const p = params.target + (first + node) * params.row_stride;
    const float* const q =
        params.draft == nullptr ? nullptr : params.draft + (first + node) * params.row_stride;
    const auto set = [&](auto&& change) {
      block.wait();
      if (block.leads()) change();
      block.wait();
    };
    set([&] { residual.rounds = 0, residual.drawn = q != nullptr; });
    double q_left = 1;  // sum of q without the tokens of earlier rounds
    bool scaled = true;
    uint32_t tests = 0;
    int32_t child = next_child_of(trees, request, node, node);
    for (; child >= 0; child = next_child_of(trees, request, node, child)) {
      const int32_t token = trees.tokens[first + child];
      if (token < 0 || token >= params.vocabulary) continue;
      if (!scaled) {
        const double left = block.sum(p, q);
        set([&] {
          // Rounding may leave nothing of two equal distributions: then nothing was rejected.
          if (left > 0) {
            residual.p_scale[residual.rounds - 1] = 1 / left;
          } else {
            --residual.rounds;
          }
        });
        scaled = true;
      }
      bool repeated = false;
      for (int32_t k = 0; k < residual.rounds; ++k) repeated |= residual.tokens[k] == token;
      const double q_scale = q_left > 0 ? 1 / q_left : 0;
      const double proposed = q == nullptr ? 1 : repeated ? 0 : q[token] * q_scale;
      if (!(proposed > 0)) continue;  // it cannot have been drawn
      const double wanted = residual_at(residual, p[token], q == nullptr ? 0 : q[token], token);
      if (uniform_at(seed, position, kDrawTests + tests++) * proposed < wanted) break;
      if (q != nullptr) q_left -= q[token];
      set([&] {
        residual.tokens[residual.rounds] = token;
        residual.p_scale[residual.rounds] = 1;
        residual.q_scale[residual.rounds++] = q_scale;
      });
      scaled = false;
    }
    if (child >= 0) {
      node = child;
      continue;
    }
    if (!block.is_last(p, q)) return;
    const double uniform = uniform_at(seed, position, kDrawToken);
    int32_t bonus = block.draw(p, q, uniform);
    if (bonus < 0 && residual.rounds > 0) {
      set([&] { --residual.rounds; });
      bonus = block.draw(p, q, uniform);
    }
    return path.end(bonus);
  }
}

}  // namespace fovea::kernels
