// SPDX-License-Identifier: Apache-2.0
#include "engine/ngram_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string_view>
#include <vector>

#include "support/cases.h"

namespace fovea {
namespace {

using Tokens = std::vector<int32_t>;

Tokens guesses(const Tokens& text, int32_t count) {
  NgramIndex index;
  Tokens drafts;
  index.guess(text, count, drafts);
  return drafts;
}

TEST(NgramIndex, GuessesWhatFollowedTheLongestMatch) {
  EXPECT_EQ(guesses({1, 2, 3, 4, 5, 1, 2}, 2), (Tokens{3, 4}));
  EXPECT_EQ(guesses({1, 2, 7, 0, 2, 3, 8, 0, 1, 2, 3, 9, 1, 2}, 1), (Tokens{3})) << "the newest";
  EXPECT_EQ(guesses({0, 1, 2, 7, 5, 1, 2, 8, 0, 1, 2}, 2), (Tokens{7, 5})) << "the longest";
}

TEST(NgramIndex, GuessesNothingAfterNewTokens) {
  EXPECT_EQ(guesses({}, 4), Tokens());
  EXPECT_EQ(guesses({1}, 4), Tokens());
  EXPECT_EQ(guesses({1, 1}, 4), Tokens());
  EXPECT_EQ(guesses({1, 2, 3, 4, 1, 3}, 4), Tokens()) << "one equal token is not enough";
  EXPECT_EQ(guesses({1, 2, 1, 2}, 0), Tokens());
  EXPECT_EQ(guesses({1, 2, 1, 2}, -1), Tokens());
}

TEST(NgramIndex, ContinuesRepetitions) {
  EXPECT_EQ(guesses({5, 5, 5}, 4), (Tokens{5, 5, 5, 5}));
  EXPECT_EQ(guesses({1, 2, 3, 1, 2, 3, 1, 2}, 7), (Tokens{3, 1, 2, 3, 1, 2, 3}));
}

// Returns the tokens after the longest match of up to 16 tokens, the newest of equally long ones.
Tokens naive_guesses(const Tokens& text, size_t count) {
  size_t best = 0, longest = 1;
  for (size_t place = text.size() - 1; place >= 2 && place < text.size(); --place) {
    size_t match = 0;
    while (match < std::min<size_t>(16, place) &&
           text[place - 1 - match] == text[text.size() - 1 - match])
      ++match;
    if (match > longest) {
      longest = match;
      best = place;
    }
  }
  Tokens continued = text;
  if (best == 0) return {};
  for (size_t i = 0; i < count; ++i) continued.push_back(continued[best + i]);
  return {continued.begin() + static_cast<int64_t>(text.size()), continued.end()};
}

// Texts have few repetitions of a pair, so that the bound of the search is not reached; they are
// long enough to outgrow the first hash table.
TEST(NgramIndex, GrowingTextsAgreeWithANaiveSearch) {
  std::mt19937 random(3);
  for (int round = 0; round < 4 * test::test_scale(); ++round) {
    NgramIndex index;
    Tokens text;
    int found = 0;
    while (text.size() < 3000) {
      const bool repeats = text.size() > 20 && random() % 16 == 0;
      const size_t from = repeats ? random() % (text.size() - 12) : 0;
      for (size_t i = 0; i < 1 + random() % 10; ++i)
        text.push_back(repeats ? text[from + i] : static_cast<int32_t>(random() % 300));
      Tokens drafts{-7};
      index.guess(text, 5, drafts);
      ASSERT_EQ(drafts.front(), -7);
      drafts.erase(drafts.begin());
      ASSERT_EQ(drafts, naive_guesses(text, 5)) << text.size();
      found += !drafts.empty();
    }
    EXPECT_GT(found, 20);
  }
}

}  // namespace
}  // namespace fovea
