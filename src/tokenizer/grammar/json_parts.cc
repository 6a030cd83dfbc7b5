// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/grammar/json_parts.h"

#include <algorithm>

namespace fovea::grammar {
namespace {

constexpr int kMaxIndent = 20;

std::vector<Edge> edges_to(std::string_view bytes, int32_t next) {
  std::vector<Edge> edges;
  for (const char byte : bytes)
    edges.push_back({static_cast<uint8_t>(byte), static_cast<uint8_t>(byte), next});
  return edges;
}

bool is_without(const std::vector<uint8_t>& without, int byte) {
  return std::ranges::find(without, static_cast<uint8_t>(byte)) != without.end();
}

}  // namespace

// The first node exists before the rule is built, so that the rule may call itself.
template <typename Build>
int32_t JsonParts::rule(int32_t& cached, int32_t next, const Build& build, bool bounded) {
  if (cached == kNone) {
    cached = automaton_.dead();
    const int32_t first = build(automaton_.end());
    automaton_.set(cached, {.free = {first}});
  }
  return automaton_.call(cached, next, bounded);
}

int32_t JsonParts::space(int32_t next) {
  return rule(space_, next, [&](int32_t end) {
    int32_t indent = end;
    for (int i = 0; i < kMaxIndent; ++i)
      indent = automaton_.any_of({automaton_.bytes(' ', ' ', indent), end});
    return automaton_.any_of(
        {end, automaton_.bytes(' ', ' ', end), automaton_.bytes('\n', '\n', indent)});
  });
}

int32_t JsonParts::value(int32_t next) {
  return rule(value_, next, [&](int32_t end) {
    return automaton_.any_of({object(end, true), array(end, true), string(end), number(end),
                              literal("true", end), literal("false", end), literal("null", end)});
  });
}

int32_t JsonParts::object(int32_t next, bool bounded) {
  const auto build = [&](int32_t end) {
    const int32_t close = automaton_.bytes('}', '}', end);
    const int32_t after = automaton_.dead();
    const int32_t member = string(automaton_.bytes(':', ':', space(value(after))));
    automaton_.set(after, {.free = {space(close), automaton_.bytes(',', ',', space(member))}});
    return automaton_.bytes('{', '{', space(automaton_.any_of({close, member})));
  };
  return rule(object_, next, build, bounded);
}

int32_t JsonParts::array(int32_t next, bool bounded) {
  const auto build = [&](int32_t end) {
    const int32_t close = automaton_.bytes(']', ']', end);
    const int32_t after = automaton_.dead();
    const int32_t item = value(after);
    automaton_.set(after, {.free = {space(close), automaton_.bytes(',', ',', space(item))}});
    return automaton_.bytes('[', '[', space(automaton_.any_of({close, item})));
  };
  return rule(array_, next, build, bounded);
}

int32_t JsonParts::string(int32_t next) {
  return rule(string_, next, [&](int32_t end) {
    const int32_t inside = automaton_.dead();
    Node node = automaton_.node(character(inside, true));
    node.edges.push_back({'"', '"', end});
    automaton_.set(inside, std::move(node));
    return automaton_.bytes('"', '"', inside);
  });
}

int32_t JsonParts::string(int64_t min_length, std::optional<int64_t> max_length, int32_t next) {
  if (min_length <= 0 && !max_length) return string(next);
  int32_t inside = kNone;
  const int64_t counted = max_length.value_or(min_length);
  if (!max_length) {
    inside = automaton_.dead();
    Node node = automaton_.node(character(inside, true));
    node.edges.push_back({'"', '"', next});
    automaton_.set(inside, std::move(node));
  } else {
    inside = automaton_.bytes('"', '"', next);
  }
  for (int64_t left = counted - 1; left >= 0; --left) {
    Node node = automaton_.node(character(inside, true));
    if (left >= min_length) node.edges.push_back({'"', '"', next});
    inside = automaton_.add(std::move(node));
  }
  return automaton_.bytes('"', '"', inside);
}

// Adds the bytes that begin a character of UTF-8 beyond ASCII.
void JsonParts::add_lead_bytes(Node& node, int32_t next, const std::vector<uint8_t>& without) {
  const int32_t last = automaton_.bytes(0x80, 0xBF, next);
  const int32_t two = automaton_.bytes(0x80, 0xBF, last);
  const int32_t three = automaton_.bytes(0x80, 0xBF, two);
  const Edge leads[] = {{0xC2, 0xDF, last},  {0xE0, 0xE0, automaton_.bytes(0xA0, 0xBF, last)},
                        {0xE1, 0xEC, two},   {0xED, 0xED, automaton_.bytes(0x80, 0x9F, last)},
                        {0xEE, 0xEF, two},   {0xF0, 0xF0, automaton_.bytes(0x90, 0xBF, two)},
                        {0xF1, 0xF3, three}, {0xF4, 0xF4, automaton_.bytes(0x80, 0x8F, two)}};
  for (const Edge& lead : leads) {
    for (int byte = lead.low; byte <= lead.high; ++byte) {
      if (is_without(without, byte)) continue;
      if (!node.edges.empty() && node.edges.back().high + 1 == byte &&
          node.edges.back().target == lead.target) {
        node.edges.back().high = static_cast<uint8_t>(byte);
      } else {
        node.edges.push_back({static_cast<uint8_t>(byte), static_cast<uint8_t>(byte), lead.target});
      }
    }
  }
}

// Adds a character of a text: UTF-8, or an escape.
int32_t JsonParts::character(int32_t next, bool with_escapes) {
  Node node{.edges = {{0x20, 0x21, next}, {0x23, 0x5B, next}, {0x5D, 0x7F, next}}};
  add_lead_bytes(node, next, {});
  if (with_escapes) node.edges.push_back({'\\', '\\', escape(next)});
  return automaton_.add(std::move(node));
}

int32_t JsonParts::hex(int32_t next) {
  return automaton_.add({.edges = {{'0', '9', next}, {'A', 'F', next}, {'a', 'f', next}}});
}

// Adds the rest of an escape. Surrogates come in pairs only.
int32_t JsonParts::escape(int32_t next) {
  const int32_t last_two = hex(hex(next));
  const int32_t last_three = hex(last_two);
  const int32_t low = automaton_.text(
      "\\u",
      automaton_.add({.edges = edges_to("dD", automaton_.add({.edges = {{'c', 'f', last_two},
                                                                        {'C', 'F', last_two}}}))}));
  const int32_t after_low = hex(hex(low));
  Node surrogate{.edges = {{'0', '7', last_two}}};
  for (const Edge& edge : edges_to("89abAB", after_low)) surrogate.edges.push_back(edge);
  Node code{.edges = {{'0', '9', last_three}}};
  for (const Edge& edge : edges_to("abcefABCEF", last_three)) code.edges.push_back(edge);
  for (const Edge& edge : edges_to("dD", automaton_.add(std::move(surrogate))))
    code.edges.push_back(edge);
  Node first{.edges = edges_to("\"\\/bfnrt", next)};
  first.edges.push_back({'u', 'u', automaton_.add(std::move(code))});
  return automaton_.add(std::move(first));
}

int32_t JsonParts::other_string(std::vector<std::string> excluded, int32_t next) {
  std::ranges::sort(excluded);
  const int32_t tail = automaton_.dead();
  Node node = automaton_.node(character(tail, false));
  node.edges.push_back({'"', '"', next});
  automaton_.set(tail, std::move(node));
  const std::vector<std::string_view> views(excluded.begin(), excluded.end());
  return automaton_.bytes('"', '"', other_than(views, 0, tail, next));
}

// Adds texts that differ from all of `excluded`, which share their first `at` bytes. Where they
// continue with a byte beyond ASCII, all characters with that first byte are left out.
int32_t JsonParts::other_than(const std::vector<std::string_view>& excluded, size_t at,
                              int32_t tail, int32_t next) {
  Node node;
  std::vector<uint8_t> continued;
  for (size_t i = 0; i < excluded.size();) {
    if (excluded[i].size() == at) {
      ++i;
      continue;
    }
    const char byte = excluded[i][at];
    std::vector<std::string_view> same;
    for (; i < excluded.size() && excluded[i][at] == byte; ++i) same.push_back(excluded[i]);
    continued.push_back(static_cast<uint8_t>(byte));
    if (continued.back() < 0x80) {
      const int32_t target = other_than(same, at + 1, tail, next);
      node.edges.push_back({continued.back(), continued.back(), target});
    }
  }
  for (int byte = 0x20; byte < 0x80; ++byte) {
    if (byte == '"' || byte == '\\' || is_without(continued, byte)) continue;
    node.edges.push_back({static_cast<uint8_t>(byte), static_cast<uint8_t>(byte), tail});
  }
  add_lead_bytes(node, tail, continued);
  const bool is_excluded =
      std::ranges::any_of(excluded, [&](std::string_view text) { return text.size() == at; });
  if (!is_excluded) node.edges.push_back({'"', '"', next});
  return automaton_.add(std::move(node));
}

int32_t JsonParts::digits(int min_digits, int max_digits, int32_t next) {
  int32_t node = next;
  for (int i = max_digits - 1; i >= 0; --i) {
    const int32_t more = automaton_.bytes('0', '9', node);
    node = i >= min_digits ? automaton_.any_of({more, next}) : more;
  }
  return node;
}

int32_t JsonParts::integer(int32_t next) {
  return rule(integer_, next, [&](int32_t end) {
    const int32_t positive =
        automaton_.any_of({automaton_.bytes('0', '0', end),
                           automaton_.bytes('1', '9', digits(0, kMaxDigits - 1, end))});
    return automaton_.any_of({positive, automaton_.bytes('-', '-', positive)});
  });
}

int32_t JsonParts::number(int32_t next) {
  return rule(number_, next, [&](int32_t end) {
    const int32_t power = automaton_.add(
        {.edges = edges_to(
             "eE",
             automaton_.any_of({digits(1, 2, end),
                                automaton_.add({.edges = edges_to("+-", digits(1, 2, end))})}))});
    const int32_t after = automaton_.any_of({end, power});
    const int32_t fraction = automaton_.bytes('.', '.', digits(1, kMaxDigits, after));
    return integer(automaton_.any_of({after, fraction}));
  });
}

// Adds the numbers of [low, high], 0 <= low <= high, without leading zeros.
int32_t JsonParts::digits_between(int64_t low, int64_t high, int32_t next) {
  std::vector<int32_t> choices;
  for (int64_t first = 0, last = 9; first <= high; first = last + 1, last = last * 10 + 9) {
    // The numbers of one length.
    if (last >= low) {
      const std::string from = std::to_string(std::max(low, first));
      const std::string to = std::to_string(std::min(high, last));
      // Nodes for the rest of the digits: equal to both bounds so far, to one, or to none.
      int32_t both = next, above = next, below = next, inside = next;
      for (size_t i = from.size(); i-- > 0;) {
        const auto a = static_cast<uint8_t>(from[i]), b = static_cast<uint8_t>(to[i]);
        Node on_both, on_low{.edges = {{a, a, above}}}, on_high{.edges = {{b, b, below}}};
        if (a < '9') on_low.edges.push_back({static_cast<uint8_t>(a + 1), '9', inside});
        if (b > '0') on_high.edges.push_back({'0', static_cast<uint8_t>(b - 1), inside});
        if (a == b) {
          on_both.edges.push_back({a, a, both});
        } else if (a < b) {
          on_both.edges = {{a, a, above}, {b, b, below}};
          if (b - a > 1)
            on_both.edges.push_back(
                {static_cast<uint8_t>(a + 1), static_cast<uint8_t>(b - 1), inside});
        }
        both = automaton_.add(std::move(on_both));
        above = automaton_.add(std::move(on_low));
        below = automaton_.add(std::move(on_high));
        inside = automaton_.bytes('0', '9', inside);
      }
      choices.push_back(both);
    }
    if (last > std::numeric_limits<int64_t>::max() / 10 - 1) break;
  }
  return automaton_.any_of(std::move(choices));
}

int32_t JsonParts::integer(int64_t low, int64_t high, int32_t next) {
  std::vector<int32_t> choices;
  if (high >= 0) choices.push_back(digits_between(std::max<int64_t>(low, 0), high, next));
  if (low < 0)
    choices.push_back(
        automaton_.bytes('-', '-', digits_between(std::max<int64_t>(-high, 1), -low, next)));
  return automaton_.any_of(std::move(choices));
}

}  // namespace fovea::grammar
