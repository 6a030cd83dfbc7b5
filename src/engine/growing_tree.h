// SPDX-License-Identifier: Apache-2.0
// The likeliest tree of drafts of a request (EAGLE-2, arXiv:2406.16858), while it grows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/draft_tree.h"
#include "engine/sampler.h"

namespace fovea {

// A draft's score is the log-probability, by the draft model, of the path that leads to it. The
// best `wanted` drafts are a tree, because no draft is likelier than its parent. Each step computes
// the best of them whose children are unknown, together with all that were computed before.
class GrowingTree {
 public:
  // Each node gets up to `branches` children, and up to `room` drafts are computed.
  GrowingTree(int32_t last_token, int32_t wanted, int32_t branches, int32_t room);

  // Chooses the drafts of the next step. Returns false if the tree is complete; do not call it
  // again then.
  bool choose();
  // The computed nodes with those chosen last, which are the last `chosen` ones. parents: -1 for
  // the request's last token, which is the first one; see PassPart.
  std::span<const int32_t> tokens() const { return tokens_; }
  std::span<const int32_t> parents() const { return parents_; }
  int32_t chosen() const { return chosen_; }
  // Sets the children of a computed node: the token drawn after it, and the likeliest others. The
  // drawn one counts as likely as the likeliest, because the model's draw is often the same.
  void add_children(int32_t place, const SampledToken& drawn);

  // Returns the best drafts, the best first.
  DraftTree finish() const;

 private:
  struct Node {
    int32_t token = 0;
    int32_t parent = -1;
    int32_t place = -1;  // its number among the computed ones
    double score = 0;
  };
  std::vector<int32_t> best() const;
  void compute(int32_t node);

  std::vector<Node> nodes_;                // node 0 is the request's last token
  std::vector<int32_t> computed_;          // nodes by their place
  std::vector<int32_t> tokens_, parents_;  // tokens and parents of these
  int32_t wanted_, branches_, room_, steps_left_;
  int32_t chosen_ = 1;
};

}  // namespace fovea
