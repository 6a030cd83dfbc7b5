// SPDX-License-Identifier: Apache-2.0
// Global functions, and the formats of texts.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>

#include "tokenizer/chat_template/interpreter.h"
#include "tokenizer/chat_template/python_text.h"

namespace fovea::jinja {
namespace {

constexpr int64_t kMaxRange = 100'000;  // as in the sandbox of jinja2

Value make_range(const Call& call) {
  const Bound bound(call, {"start", "stop", "step"});
  const int64_t first = bound.required(0).integer();
  const int64_t start = bound.has(1) ? first : 0;
  const int64_t stop = bound.has(1) ? bound.required(1).integer() : first;
  const int64_t step = bound.integer_or(2, 1);
  if (step == 0) throw Failure{"the step of range() is 0"};
  List items;
  for (int64_t at = start; step > 0 ? at < stop : at > stop;) {
    if (items.size() >= static_cast<size_t>(kMaxRange))
      throw Failure{fmt::format("range() has more than {} numbers", kMaxRange)};
    items.emplace_back(at);
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  call.run.charge(items.size());
  return items;
}

Dict named_values(const Call& call) {
  Dict dict;
  for (const Value& given : call.arguments.positional) {
    if (given.dict() == nullptr)
      throw Failure{
          fmt::format("{}() takes a dict or named values, not a {}", call.name, given.type_name())};
    for (const auto& [key, value] : given.dict()->entries()) dict.set(key, value);
  }
  for (const auto& [name, value] : call.arguments.named) dict.set(name, value);
  return dict;
}

Value make_dict(const Call& call) { return named_values(call); }

Value make_namespace(const Call& call) {
  const auto space = std::make_shared<Namespace>();
  const Dict values = named_values(call);
  for (const auto& [name, value] : values.entries()) space->set(name.str(), value);
  return space;
}

Value raise(const Call& call) { throw Failure{Bound(call, {"message"}).required(0).str()}; }

Value format_time(const Call& call) {
  const std::string& format = Bound(call, {"format"}).text(0);
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm local = {};
  localtime_r(&now, &local);
  char text[1024];
  const size_t bytes =
      format.empty() ? 0 : std::strftime(text, sizeof text, format.c_str(), &local);
  if (bytes == 0 && !format.empty())
    throw Failure{fmt::format("the time has more than {} bytes", sizeof text - 1)};
  return std::string_view(text, bytes);
}

constexpr Builtin kGlobals[] = {{"dict", make_dict},
                                {"namespace", make_namespace},
                                {"raise_exception", raise},
                                {"range", make_range},
                                {"strftime_now", format_time}};

}  // namespace

const Builtin* find_global(std::string_view name) {
  const auto found = std::ranges::find(kGlobals, name, &Builtin::name);
  return found == std::end(kGlobals) ? nullptr : found;
}

std::string format_percent(std::string_view format, const List& values) {
  std::string text;
  size_t used = 0;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      text += format[i];
      continue;
    }
    const char kind = ++i < format.size() ? format[i] : ' ';
    if (kind == '%') {
      text += '%';
      continue;
    }
    if (used >= values.size()) throw Failure{"a format has more places than values"};
    const Value& value = values[used++];
    if (kind == 's') {
      text += value.str();
    } else if (kind == 'd' || kind == 'i') {
      text +=
          std::to_string(value.is_float() ? static_cast<int64_t>(value.number()) : value.integer());
    } else if (kind == 'r') {
      text += value.repr();
    } else {
      throw Failure{fmt::format("the format '%{}' is not supported", kind)};
    }
  }
  if (used < values.size()) throw Failure{"a format has more values than places"};
  return text;
}

std::string format_braces(std::string_view format, const Arguments& arguments) {
  std::string text;
  size_t next = 0;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format.substr(i).starts_with("{{") || format.substr(i).starts_with("}}")) {
      text += format[i++];
      continue;
    }
    if (format[i] != '{') {
      text += format[i];
      continue;
    }
    const size_t end = format.find('}', i);
    if (end == format.npos) throw Failure{"a format has '{' without '}'"};
    const std::string_view name = format.substr(i + 1, end - i - 1);
    const bool digits = name.find_first_not_of("0123456789") == name.npos && name.size() < 4;
    const auto named =
        std::ranges::find(arguments.named, name, &std::pair<std::string, Value>::first);
    if (digits) {
      const size_t at = name.empty() ? next++ : std::stoul(std::string(name));
      if (at >= arguments.positional.size()) throw Failure{"a format has more places than values"};
      text += arguments.positional[at].str();
    } else if (named != arguments.named.end()) {
      text += named->second.str();
    } else {
      throw Failure{fmt::format("the place '{{{}}}' of a format is not supported", name)};
    }
    i = end;
  }
  return text;
}

}  // namespace fovea::jinja
