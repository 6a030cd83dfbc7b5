// SPDX-License-Identifier: Apache-2.0
// Trees of drafts of a draft model or a head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/draft_states.h"
#include "engine/growing_tree.h"
#include "engine/model_runner.h"
#include "engine/sampler.h"

namespace fovea {

// Each step computes the whole trees of some requests anew, after their text but for its last
// token. So a tree is one part of a pass with a mask, the features of all its tokens are known or
// results of the step before, and every draft is stored at one place, which no branch shares.
class TreeDrafts {
 public:
  // Up to `logit_rows` rows of logits of a pass are read, none if the runner finds the likeliest
  // tokens. The states and the runner must outlive it.
  TreeDrafts(DraftStates& states, ModelRunner& runner, int32_t vocabulary, size_t logit_rows)
      : states_(states),
        runner_(runner),
        sampler_(vocabulary),
        width_(static_cast<size_t>(vocabulary)),
        logits_(std::make_unique_for_overwrite<float[]>(logit_rows * width_)) {}

  // Sets the requests' drafts, up to `branches` after each token. Returns how long the device
  // computed.
  double draft(std::span<Drafting> requests, int32_t branches);

 private:
  struct Growing {
    Drafting* drafting = nullptr;
    GrowingTree tree;
    bool complete = false;
    int32_t hidden_row = -1;  // in the last pass: of its first token; -1: it computed text only
  };
  void compute_text(Drafting& drafting);
  void grow(std::span<Drafting> requests);
  bool choose(Growing& growing);
  void add_text(Growing& growing);
  void add_tree(Growing& growing);
  void add_token(int32_t token, int32_t features);
  void run();
  std::optional<SampledToken> draw(const PassPart& part, const DraftState& state, size_t row,
                                   int32_t place);

  DraftStates& states_;
  ModelRunner& runner_;
  Sampler sampler_;
  size_t width_;
  std::unique_ptr<float[]> logits_;
  int32_t branches_ = 1;
  double device_seconds_ = 0;
  // One pass.
  std::vector<Growing> growing_;
  std::vector<Growing*> members_;
  std::vector<PassPart> parts_;
  std::vector<int32_t> tokens_, features_, drawn_;
};

}  // namespace fovea
