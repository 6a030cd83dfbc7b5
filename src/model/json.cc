// SPDX-License-Identifier: Apache-2.0
#include "model/json.h"

#include <algorithm>
#include <functional>
#include <unordered_set>
#include <vector>

#include "core/check.h"

namespace fovea {
namespace {

using nlohmann::json;

// Refuses deep nesting and repeated keys while the document is built.
class Guard {
 public:
  Guard(std::string_view name, int max_depth) : name_(name), max_depth_(max_depth) {}

  bool operator()(int depth, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
        keys_.emplace_back();
        [[fallthrough]];
      case json::parse_event_t::array_start:
        if (depth >= max_depth_) {
          fail(ErrorCode::corrupt_file, "{}: nested deeper than {} levels", name_, max_depth_);
        }
        break;
      case json::parse_event_t::object_end:
        keys_.pop_back();
        break;
      case json::parse_event_t::key:
        if (!keys_.back().insert(parsed.get_ref<const std::string&>()).second) {
          fail(ErrorCode::corrupt_file, "{}: key '{}' is there twice in one object", name_,
               clipped(parsed.get_ref<const std::string&>()));
        }
        break;
      default:
        break;
    }
    return true;
  }

 private:
  std::string_view name_;
  int max_depth_;
  std::vector<std::unordered_set<std::string>> keys_;  // of the objects that are open
};

}  // namespace

nlohmann::json parse_json(std::string_view text, std::string_view name, JsonLimits limits) {
  if (text.size() > limits.bytes) {
    fail(ErrorCode::corrupt_file, "{}: {} bytes of JSON, the limit is {}", name, text.size(),
         limits.bytes);
  }
  Guard guard(name, limits.depth);
  try {
    return json::parse(text.begin(), text.end(), std::ref(guard));
  } catch (const json::exception& error) {
    fail(ErrorCode::corrupt_file, "{}: {}", name, json_problem(error));
  }
}

std::string json_problem(const nlohmann::json::exception& error) {
  std::string_view what = error.what();
  // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
  if (const size_t end = what.find("] "); end != what.npos) what.remove_prefix(end + 2);
  return clipped(what);
}

std::string json_shown(const nlohmann::json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  return clipped(value.dump(-1, ' ', false, json::error_handler_t::replace));
}

std::string clipped(std::string_view text) {
  constexpr size_t kLongest = 200;
  size_t end = std::min(text.size(), kLongest);
  const auto is_continuation = [&] { return (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80; };
  while (end < text.size() && end > 0 && is_continuation()) --end;
  std::string shown;
  for (const char c : text.substr(0, end)) {
    if (static_cast<unsigned char>(c) < 0x20) {
      shown += fmt::format("\\x{:02x}", c);
    } else {
      shown += c;
    }
  }
  if (end < text.size()) shown += fmt::format("... ({} bytes)", text.size());
  return shown;
}

}  // namespace fovea
