// SPDX-License-Identifier: Apache-2.0
// Finds stop strings in streamed text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fovea {

// Text is held back while it could still turn out to be the beginning of a stop string, so that no
// part of one is ever handed out.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // Appends text. Returns what became certain; after a match, what stood before the earliest stop
  // string. Nothing is returned once matched() holds.
  std::string push(std::string_view text);
  // The end of the stream: what was held back.
  std::string finish();
  bool matched() const { return matched_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool matched_ = false;
};

}  // namespace fovea
