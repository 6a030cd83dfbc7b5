// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "tokenizer/chat_template/builtins.h"

namespace fovea::jinja {

Bound::Bound(const Call& call, std::initializer_list<std::string_view> parameters)
    : callee_(call.name), names_(parameters), values_(parameters.size()) {
  const List& given = call.arguments.positional;
  if (given.size() > names_.size()) {
    throw Failure{
        fmt::format("{}() takes up to {} arguments, not {}", callee_, names_.size(), given.size())};
  }
  std::ranges::copy(given, values_.begin());
  for (const auto& [name, value] : call.arguments.named) {
    const auto found = std::ranges::find(names_, name);
    if (found == names_.end())
      throw Failure{fmt::format("{}() has no parameter '{}'", callee_, name)};
    auto& place = values_[static_cast<size_t>(found - names_.begin())];
    if (place) throw Failure{fmt::format("{}() has '{}' twice", callee_, name)};
    place = value;
  }
}

const Value& Bound::required(size_t i) const {
  if (!has(i)) throw Failure{fmt::format("{}() needs '{}'", callee_, names_[i])};
  return *values_[i];
}

int64_t Bound::integer_or(size_t i, int64_t fallback) const {
  if (!has(i)) return fallback;
  const Value& value = *values_[i];
  if (!value.is_integer() && !value.is_bool()) {
    throw Failure{fmt::format("'{}' of {}() is a {}, must be an integer", names_[i], callee_,
                              value.type_name())};
  }
  return value.integer();
}

bool Bound::flag_or(size_t i, bool fallback) const {
  return has(i) ? values_[i]->truth() : fallback;
}

const std::string& Bound::text(size_t i) const {
  const Value& value = required(i);
  if (value.text() == nullptr) {
    throw Failure{
        fmt::format("'{}' of {}() is a {}, must be a text", names_[i], callee_, value.type_name())};
  }
  return *value.text();
}

std::optional<std::string_view> Bound::optional_text(size_t i) const {
  if (!has(i) || values_[i]->is_none()) return std::nullopt;
  return text(i);
}

const std::string& text_of(const Call& call) {
  if (call.subject.text() == nullptr)
    throw Failure{fmt::format("{}() is no method of a {}", call.name, call.subject.type_name())};
  return *call.subject.text();
}

}  // namespace fovea::jinja
