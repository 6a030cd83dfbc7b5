// SPDX-License-Identifier: Apache-2.0
// Finds stop strings in streamed text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fovea {

// Withholds text that may be the beginning of a stop string, so that no part of a stop string is
// ever returned. The text of special tokens is matched but never returned: a stop string matches in
// the text with it or in the text without it.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  // Appends text. Returns the text that can no longer belong to a stop string; after a match, the
  // text before the earliest stop string. Returns nothing once matched() is true.
  std::string push(std::string_view text);
  // Does the same for the text of a special token, none of which is ever returned.
  std::string push_hidden(std::string_view text);
  // Ends the stream and returns the withheld text.
  std::string finish();
  bool matched() const { return matched_; }

 private:
  std::string match();
  // Returns the bytes of held_ before `end` that are not hidden.
  std::string shown(size_t end = std::string::npos) const;

  std::vector<std::string> stops_;
  std::string held_;
  std::vector<bool> hidden_;  // one entry per byte of held_
  bool matched_ = false;
};

}  // namespace fovea
