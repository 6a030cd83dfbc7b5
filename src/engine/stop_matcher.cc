// SPDX-License-Identifier: Apache-2.0
#include "engine/stop_matcher.h"

#include <algorithm>
#include <utility>

namespace fovea {
namespace {

// Length of the longest end of `text` that begins `stop`.
size_t overlap(std::string_view text, std::string_view stop) {
  for (size_t length = std::min(text.size(), stop.size() - 1); length > 0; --length)
    if (text.substr(text.size() - length) == stop.substr(0, length)) return length;
  return 0;
}

}  // namespace

std::string StopMatcher::push(std::string_view text) {
  if (matched_) return {};
  held_ += text;
  size_t first = std::string::npos;
  for (const std::string& stop : stops_) first = std::min(first, held_.find(stop));
  if (first != std::string::npos) {
    matched_ = true;
    held_.resize(first);
    return std::exchange(held_, {});
  }
  size_t keep = 0;
  for (const std::string& stop : stops_) keep = std::max(keep, overlap(held_, stop));
  std::string certain = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return certain;
}

std::string StopMatcher::finish() { return std::exchange(held_, {}); }

}  // namespace fovea
