// SPDX-License-Identifier: Apache-2.0
#include "engine/stop_matcher.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace fovea {
namespace {

TEST(StopMatcher, PassesTextThroughWithoutStops) {
  StopMatcher matcher({});
  EXPECT_EQ(matcher.push("abc"), "abc");
  EXPECT_EQ(matcher.finish(), "");
}

TEST(StopMatcher, HoldsBackWhatMayBeginAStop) {
  StopMatcher matcher({"<end>"});
  EXPECT_EQ(matcher.push("text<"), "text");
  EXPECT_EQ(matcher.push("en"), "");
  EXPECT_EQ(matcher.push("try <e"), "<entry ");
  EXPECT_EQ(matcher.push("nd>tail"), "");
  EXPECT_TRUE(matcher.matched());
  EXPECT_EQ(matcher.push("more"), "");
  EXPECT_EQ(matcher.finish(), "");
}

TEST(StopMatcher, FinishReleasesWhatWasHeld) {
  StopMatcher matcher({"\n\n"});
  EXPECT_EQ(matcher.push("a\n"), "a");
  EXPECT_EQ(matcher.finish(), "\n");
  EXPECT_FALSE(matcher.matched());
}

TEST(StopMatcher, TakesTheEarliestOfSeveral) {
  StopMatcher matcher({"dog", "cat"});
  EXPECT_EQ(matcher.push("a cat and a dog"), "a ");
  EXPECT_TRUE(matcher.matched());
}

TEST(StopMatcher, SelfOverlappingStop) {
  StopMatcher matcher({"aab"});
  std::string out = matcher.push("aa");
  out += matcher.push("a");
  out += matcher.push("b");
  EXPECT_EQ(out, "a");
  EXPECT_TRUE(matcher.matched());
}

TEST(StopMatcher, TextOfSpecialTokensIsMatchedAndNeverReturned) {
  struct Piece {
    std::string text;
    bool hidden = false;
  };
  struct Case {
    std::vector<std::string> stops;
    std::vector<Piece> pieces;
    std::string out;
    bool matched = false;
  };
  const Case cases[] = {
      {{"<e>"}, {{"a"}, {"<e>", true}, {"b"}}, "a", true},
      {{"a<e>"}, {{"ba"}, {"<e>", true}}, "b", true},
      {{"<e>b"}, {{"a"}, {"<e>", true}, {"bc"}}, "a", true},
      {{"<e>b"}, {{"a"}, {"<e>", true}, {"c"}}, "ac", false},
      {{"ab"}, {{"xa"}, {"<e>", true}, {"b"}}, "x", true},  // as without the token
      {{"<e><f>"}, {{"a"}, {"<e>", true}, {"<f>", true}}, "a", true},
      {{"b"}, {{"a"}, {"<b>", true}}, "a", true},
      {{"xyz"}, {{"x"}, {"<e>", true}, {"y"}, {"<e>", true}, {"w"}}, "xyw", false},
      {{}, {{"a"}, {"<e>", true}, {"b"}}, "ab", false},
  };
  for (const Case& each : cases) {
    StopMatcher matcher(each.stops);
    std::string out;
    for (const Piece& piece : each.pieces) {
      out += piece.hidden ? matcher.push_hidden(piece.text) : matcher.push(piece.text);
    }
    out += matcher.finish();
    EXPECT_EQ(out, each.out) << testing::PrintToString(each.stops);
    EXPECT_EQ(matcher.matched(), each.matched) << testing::PrintToString(each.stops);
  }
}

// However the text is cut, the output is the text before the stop string that ends first.
TEST(StopMatcher, DoesNotDependOnTokenBoundaries) {
  std::mt19937 random(5);
  for (int round = 0; round < 5000; ++round) {
    std::string text;
    for (int i = 0; i < 30; ++i) text += static_cast<char>('a' + random() % 3);
    std::vector<std::string> stops(1 + random() % 3);
    for (std::string& stop : stops)
      for (size_t length = 1 + random() % 5; length > 0; --length)
        stop += static_cast<char>('a' + random() % 3);

    std::string expected = text;
    size_t first_end = std::string::npos;
    for (size_t end = 1; end <= text.size() && first_end == std::string::npos; ++end)
      for (const std::string& stop : stops) {
        const size_t at = std::string_view(text).substr(0, end).find(stop);
        if (at == std::string::npos) continue;
        first_end = end;
        expected.resize(std::min(expected.size(), at));
      }

    StopMatcher by_characters(stops);
    std::string out;
    for (const char c : text) out += by_characters.push(std::string_view(&c, 1));
    out += by_characters.finish();
    EXPECT_EQ(out, expected);
    EXPECT_EQ(by_characters.matched(), first_end != std::string::npos);

    StopMatcher by_pieces(stops);
    std::string pieces;
    for (size_t at = 0; at < text.size() && !by_pieces.matched();) {
      const size_t length = std::min<size_t>(1 + random() % 4, text.size() - at);
      pieces += by_pieces.push(std::string_view(text).substr(at, length));
      at += length;
    }
    pieces += by_pieces.finish();
    for (const std::string& stop : stops) EXPECT_EQ(pieces.find(stop), std::string::npos);
    EXPECT_EQ(by_pieces.matched(), by_characters.matched());
  }
}

}  // namespace
}  // namespace fovea
