// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/added_tokens.h"

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace fovea {
namespace {

constexpr int32_t kPlain = 1, kLeft = 2, kRight = 3, kBoth = 4, kEndsInSpace = 5;

AddedTokenFinder finder() {
  return AddedTokenFinder({{.id = kPlain, .content = "<p>"},
                           {.id = kLeft, .content = "<l>", .lstrip = true},
                           {.id = kRight, .content = "<r>", .rstrip = true},
                           {.id = kBoth, .content = "<b>", .lstrip = true, .rstrip = true},
                           {.id = kEndsInSpace, .content = "<e> "}});
}

using Parts = std::vector<std::pair<std::string, int32_t>>;

struct Split {
  std::string text;
  Parts parts;
};

void PrintTo(const Split& split, std::ostream* to) { *to << '"' << split.text << '"'; }

// White space belongs to the token that takes it, unless a token before it has taken it already.
TEST(AddedTokens, PartsAreTheTextInOrder) {
  const Split cases[] = {
      {"", {}},
      {"  ", {{"  ", -1}}},
      {"a <p> b", {{"a ", -1}, {"<p>", kPlain}, {" b", -1}}},
      {"a <l> b", {{"a", -1}, {" <l>", kLeft}, {" b", -1}}},
      {"a <r> b", {{"a ", -1}, {"<r> ", kRight}, {"b", -1}}},
      {" \t<b>\u00a0\n", {{" \t<b>\u00a0\n", kBoth}}},
      {"<p> <l>", {{"<p>", kPlain}, {" <l>", kLeft}}},
      {"<e> <l>", {{"<e> ", kEndsInSpace}, {"<l>", kLeft}}},
      {"<e>  <l>", {{"<e> ", kEndsInSpace}, {" <l>", kLeft}}},
      {"<r>  <l>", {{"<r>  ", kRight}, {"<l>", kLeft}}},
      {"<r> <r> x", {{"<r> ", kRight}, {"<r> ", kRight}, {"x", -1}}},
      {"<b> <b>", {{"<b> ", kBoth}, {"<b>", kBoth}}},
      {"  <l><l>  ", {{"  <l>", kLeft}, {"<l>", kLeft}, {"  ", -1}}},
  };
  for (const Split& split : cases) {
    SCOPED_TRACE(testing::PrintToString(split));
    Parts parts;
    for (const TextPart& part : finder().split(split.text)) {
      parts.emplace_back(split.text.substr(part.begin, part.end - part.begin), part.token);
    }
    EXPECT_EQ(parts, split.parts);
  }
}

}  // namespace
}  // namespace fovea
