// SPDX-License-Identifier: Apache-2.0
// Finds stop strings in streamed text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fovea {

// Text is held back while it could still turn out to be the beginning of a stop string, so that no
// part of one is ever handed out. Special tokens have text that is matched and never handed out: a
// stop string ends the text where it stands in the text without theirs, or with it.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // Appends text. Returns what became certain; after a match, what stood before the earliest stop
  // string. Nothing is returned once matched() holds.
  std::string push(std::string_view text);
  // The same for the text of a special token, none of which is ever returned.
  std::string push_hidden(std::string_view text);
  // The end of the stream: what was held back.
  std::string finish();
  bool matched() const { return matched_; }

 private:
  std::string match();
  // The bytes of held_ that are not hidden, or of its beginning.
  std::string shown(size_t end = std::string::npos) const;

  std::vector<std::string> stops_;
  std::string held_;
  std::vector<bool> hidden_;  // by byte of held_
  bool matched_ = false;
};

}  // namespace fovea
