// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/drafts.h"

#include <cstring>

#include "kernels/accept_drafts.h"
#include "kernels/cpu/parallel.h"

namespace fovea::kernels::cpu {
namespace {

// One thread that sums in the order of token ids.
class OneThread {
 public:
  explicit OneThread(int32_t vocabulary) : vocabulary_(vocabulary) {}

  Residual& residual() { return residual_; }
  bool leads() const { return true; }
  void wait() const {}

  double sum(const float* p, const float* q) const {
    double total = 0;
    for (int32_t token = 0; token < vocabulary_; ++token) total += at(p, q, token);
    return total;
  }

  bool is_last(const float*, const float*) const { return true; }

  int32_t draw(const float* p, const float* q, double uniform) const {
    const double total = sum(p, q);
    if (!(total > 0)) return -1;
    double rest = uniform * total;
    int32_t last = -1;
    for (int32_t token = 0; token < vocabulary_; ++token) {
      const double weight = at(p, q, token);
      if (weight <= 0) continue;
      last = token;
      rest -= weight;
      if (rest < 0) return token;
    }
    return last;  // reached if the sum was rounded down
  }

 private:
  double at(const float* p, const float* q, int32_t token) const {
    return residual_at(residual_, p[token], q == nullptr ? 0 : q[token], token);
  }

  int32_t vocabulary_;
  Residual residual_{};
};

void move_rows(const CommitDraftsParams& params, int32_t request, const RowPiece& piece) {
  const int64_t first = int64_t{request} * params.width;
  const int32_t count = accepted_count(params, request);
  for (int32_t i = 0; i < count; ++i) {
    const int32_t node = params.nodes[first + i];
    if (node == i) continue;
    const char* const from = piece_at(piece, params.out_slots[first + node]);
    char* const to = piece_at(piece, params.out_slots[first + i]);
    if (from == nullptr || to == nullptr) continue;
    std::memcpy(to, from, static_cast<size_t>(piece.bytes));
  }
}

}  // namespace

void describe_drafts(const DescribeDraftsParams& params) {
  for (int32_t request = 0; request < params.trees.requests; ++request) {
    for (int32_t node = 0; node < params.trees.width; ++node) {
      describe_node(params, request, node);
    }
  }
}

void accept_tokens(const AcceptTokensParams& params) {
  const DraftTrees& trees = params.trees;
  for (int32_t request = 0; request < trees.requests; ++request) {
    AcceptedPath path(trees, params.accepted, request, true);
    if (trees.lens[request] < 0) {
      path.end(-1);
      continue;
    }
    const int64_t first = int64_t{request} * trees.width;
    int32_t node = 0, target = 0;
    while (node >= 0) {
      path.add(node);
      target = params.target[first + node];
      node = next_child_of(trees, request, node, node);
      while (node >= 0 && trees.tokens[first + node] != target) {
        node = next_child_of(trees, request, parent_of(trees, request, node), node);
      }
    }
    path.end(target);
  }
}

void accept_sampled(const AcceptSampledParams& params, ThreadPool& threads) {
  threads.parallel_for(params.trees.requests, [&](int64_t request, int) {
    OneThread block(params.vocabulary);
    kernels::accept_sampled(params, static_cast<int32_t>(request), block);
  });
}

void commit_drafts(const CommitDraftsParams& params, ThreadPool& threads) {
  constexpr int64_t kGrain = 64;  // pieces
  const int64_t items = int64_t{params.requests} * params.piece_count;
  parallel_ranges(threads, items, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      move_rows(params, static_cast<int32_t>(item / params.piece_count),
                params.pieces[item % params.piece_count]);
    }
  });
  for (int32_t request = 0; request < params.requests; ++request) commit_request(params, request);
}

}  // namespace fovea::kernels::cpu
