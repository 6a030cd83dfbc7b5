// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/chat_template/read_json.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "model/json.h"

namespace fovea::jinja {
namespace {

using nlohmann::json;

// Builds the value from the parser's events.
class Builder {
 public:
  static constexpr size_t kMaxDepth = 64;

  explicit Builder(std::string_view name) : name_(name) {}

  bool null() { return put({}); }
  bool boolean(bool value) { return put(value); }
  bool number_integer(json::number_integer_t value) { return put(value); }
  bool number_unsigned(json::number_unsigned_t value) {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      refuse_number(std::to_string(value));
    return put(static_cast<int64_t>(value));
  }
  bool number_float(json::number_float_t value, const std::string& text) {
    if (text.find_first_of(".eE") == text.npos) refuse_number(text.substr(0, 40));
    return put(value);
  }
  bool string(std::string& value) { return put(std::move(value)); }
  bool binary(json::binary_t&) { return false; }
  bool start_object(size_t) { return open(true); }
  bool start_array(size_t) { return open(false); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    open_.back().key = std::move(name);
    return true;
  }
  bool parse_error(size_t, const std::string&, const json::exception& error) {
    fail(ErrorCode::invalid_argument, "{}: {}", name_, json_problem(error));
  }

  Value take() { return std::move(root_); }

 private:
  // An object or array whose end has not been read.
  struct Container {
    bool object = false;
    std::string key = {};
    Dict members = {};
    List items = {};
  };

  [[noreturn]] void refuse_number(const std::string& text) const {
    fail(ErrorCode::invalid_argument, "{}: the integer {} is beyond 64 bits", name_, text);
  }

  bool put(Value value) {
    if (open_.empty()) {
      root_ = std::move(value);
    } else if (Container& last = open_.back(); last.object) {
      last.members.set(std::move(last.key), std::move(value));
    } else {
      last.items.push_back(std::move(value));
    }
    return true;
  }

  bool open(bool object) {
    check_argument(open_.size() < kMaxDepth, "{}: nested deeper than {}", name_, kMaxDepth);
    open_.push_back({object});
    return true;
  }

  bool close() {
    Container last = std::move(open_.back());
    open_.pop_back();
    return put(last.object ? Value(std::move(last.members)) : Value(std::move(last.items)));
  }

  std::string_view name_;
  std::vector<Container> open_;
  Value root_;
};

}  // namespace

Value read_json(std::string_view text, std::string_view name) {
  Builder builder(name);
  json::sax_parse(text, &builder);
  return builder.take();
}

}  // namespace fovea::jinja
