// SPDX-License-Identifier: Apache-2.0
#include "engine/stop_matcher.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace fovea {
namespace {

// Returns the length of the longest suffix of `text` that is a prefix of `stop`.
size_t overlap(std::string_view text, std::string_view stop) {
  for (size_t length = std::min(text.size(), stop.size() - 1); length > 0; --length)
    if (text.substr(text.size() - length) == stop.substr(0, length)) return length;
  return 0;
}

}  // namespace

std::string StopMatcher::push(std::string_view text) {
  if (matched_) return {};
  held_ += text;
  hidden_.resize(held_.size(), false);
  return match();
}

std::string StopMatcher::push_hidden(std::string_view text) {
  if (matched_ || stops_.empty()) return {};
  held_ += text;
  hidden_.resize(held_.size(), true);
  return match();
}

std::string StopMatcher::match() {
  const std::string text = shown();
  // Positions at which stop strings begin, or may begin, in the text without hidden bytes and with
  // them.
  size_t shown_end = std::string::npos, held_end = std::string::npos;
  size_t shown_keep = 0, held_keep = 0;
  for (const std::string& stop : stops_) {
    shown_end = std::min(shown_end, text.find(stop));
    held_end = std::min(held_end, held_.find(stop));
    shown_keep = std::max(shown_keep, overlap(text, stop));
    held_keep = std::max(held_keep, overlap(held_, stop));
  }
  if (shown_end != std::string::npos || held_end != std::string::npos) {
    matched_ = true;
    const std::string before = held_end == std::string::npos ? text : shown(held_end);
    held_.clear();
    hidden_.clear();
    return before.substr(0, shown_end);
  }
  // Everything that may belong to a stop string in either reading is withheld.
  size_t begin = held_.size();
  for (size_t kept = 0; kept < shown_keep; kept += hidden_[begin] ? 0 : 1) --begin;
  begin = std::min(begin, held_.size() - held_keep);
  std::string certain = shown(begin);
  held_.erase(0, begin);
  hidden_.erase(hidden_.begin(), hidden_.begin() + static_cast<std::ptrdiff_t>(begin));
  return certain;
}

std::string StopMatcher::shown(size_t end) const {
  std::string text;
  for (size_t i = 0; i < std::min(end, held_.size()); ++i) {
    if (!hidden_[i]) text += held_[i];
  }
  return text;
}

std::string StopMatcher::finish() {
  std::string text = shown();
  held_.clear();
  hidden_.clear();
  return text;
}

}  // namespace fovea
