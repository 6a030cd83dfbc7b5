// SPDX-License-Identifier: Apache-2.0
// The parts of JSON as rules of an automaton.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/grammar/automaton.h"

namespace fovea::grammar {

// Rules are made once, on their first use.
class JsonParts {
 public:
  static constexpr int kMaxDigits = 18;  // digits of integers, and of fractions

  explicit JsonParts(Automaton& automaton) : automaton_(automaton) {}

  int32_t value(int32_t next);                         // any value
  int32_t object(int32_t next, bool bounded = false);  // any object
  int32_t array(int32_t next, bool bounded = false);   // any array
  int32_t string(int32_t next);                        // any text with its quotes
  int32_t space(int32_t next);    // " ", or a line end with up to 20 spaces, or nothing
  int32_t number(int32_t next);   // any number
  int32_t integer(int32_t next);  // any integer
  int32_t integer(int64_t low, int64_t high, int32_t next);  // one in [low, high]
  int32_t literal(std::string_view json, int32_t next) { return automaton_.text(json, next); }

  // A text of a number of characters. Takes nodes for each character.
  int32_t string(int64_t min_length, std::optional<int64_t> max_length, int32_t next);
  // A text without escapes that is none of `excluded`.
  int32_t other_string(std::vector<std::string> excluded, int32_t next);

 private:
  int32_t character(int32_t next, bool with_escapes);
  int32_t escape(int32_t next);
  int32_t hex(int32_t next);
  int32_t digits(int min_digits, int max_digits, int32_t next);
  int32_t digits_between(int64_t low, int64_t high, int32_t next);
  int32_t other_than(const std::vector<std::string_view>& excluded, size_t at, int32_t tail,
                     int32_t next);
  void add_lead_bytes(Node& node, int32_t next, const std::vector<uint8_t>& without);
  template <typename Build>
  int32_t rule(int32_t& cached, int32_t next, const Build& build, bool bounded = false);

  Automaton& automaton_;
  int32_t value_ = kNone, object_ = kNone, array_ = kNone, string_ = kNone, space_ = kNone,
          number_ = kNone, integer_ = kNone;
};

}  // namespace fovea::grammar
