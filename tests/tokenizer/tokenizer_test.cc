// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/tokenizer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "fovea/error.h"
#include "support/expect_error.h"
#include "tokenizer/test_files.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

using nlohmann::json;

const Tokenizer& model_tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::parse(model_json().dump(), "tokenizer.json");
  return tokenizer;
}

// Returns random bytes: many form characters, many do not.
rc::Gen<std::string> any_bytes() {
  return rc::gen::container<std::string>(rc::gen::element('a', ' ', '\n', '\0', '\xF0', '\x9F',
                                                          '\x99', '\x82', '\xE2', '\xAC', '\xC3',
                                                          '\xA9', '\xED', '\xA0', '\x80', '\xFF'));
}

TEST(Tokenizer, EveryCodePointComesBack) {
  std::string text;
  for (uint32_t point = 0; point < 0x110000; ++point) {
    if (point < 0xD800 || point >= 0xE000) text += utf8(point);
  }
  const Tokenizer& tokenizer = model_tokenizer();
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

TEST(Tokenizer, AnyBytesAreText) {
  EXPECT_TRUE(rc::check("decode(encode(bytes)) is bytes with replacements", [] {
    const std::string bytes = *any_bytes();
    const Tokenizer& tokenizer = model_tokenizer();
    RC_ASSERT(tokenizer.decode(tokenizer.encode(bytes)) == replace_broken_utf8(bytes));
  }));
  const Tokenizer& tokenizer = model_tokenizer();
  EXPECT_EQ(tokenizer.encode("a\xFF"
                             "b"),
            tokenizer.encode("a\uFFFD"
                             "b"));
  EXPECT_TRUE(tokenizer.encode("").empty());
}

TEST(Tokenizer, ReplacesMaximalSubparts) {
  EXPECT_EQ(replace_broken_utf8("\xE2\x82"), "\uFFFD");
  EXPECT_EQ(replace_broken_utf8("\xE2\x82z"), "\uFFFDz");
  EXPECT_EQ(replace_broken_utf8("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");  // a surrogate
  EXPECT_EQ(replace_broken_utf8("\xC0\xAF"), "\uFFFD\uFFFD");            // overlong
  EXPECT_EQ(replace_broken_utf8("\xF0\x9F\x99"), "\uFFFD");
  EXPECT_EQ(replace_broken_utf8("\xF4\x90\x80\x80"), "\uFFFD\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(replace_broken_utf8("\x80"), "\uFFFD");
  EXPECT_EQ(replace_broken_utf8("\xF0\x9F\x99\x82"), "\xF0\x9F\x99\x82");
}

TEST(Tokenizer, SpecialTokensHaveTextThatDecodingLeavesOut) {
  const Tokenizer& tokenizer = model_tokenizer();
  ASSERT_EQ(tokenizer.size(), 2048);
  EXPECT_EQ(tokenizer.special_text(0), "<|bos|>");
  EXPECT_EQ(tokenizer.special_text(100), "");
  EXPECT_EQ(tokenizer.special_text(-1), "");
  EXPECT_EQ(tokenizer.special_text(2048), "");
  const auto tokens = tokenizer.encode("a<|eos|>b");
  ASSERT_EQ(tokens.size(), 3u);
  EXPECT_EQ(tokens[1], 1);
  EXPECT_EQ(tokenizer.decode(tokens), "ab");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{-1, tokens[0], 2048, 1 << 30}), "a");
}

TEST(Tokenizer, StreamNeverSplitsACharacter) {
  EXPECT_TRUE(rc::check("pieces are whole characters and add up", [] {
    const std::string bytes = *any_bytes();
    Utf8Stream stream;
    std::string all;
    for (size_t at = 0; at < bytes.size();) {
      const auto length = *rc::gen::inRange<size_t>(1, bytes.size() - at + 1);
      const std::string piece = stream.push(bytes.substr(at, length));
      RC_ASSERT(replace_broken_utf8(piece) == piece);
      all += piece;
      at += length;
    }
    all += stream.finish();
    RC_ASSERT(all == replace_broken_utf8(bytes));
  }));
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xF0\x9F"), "a");
  EXPECT_EQ(stream.push("\x99\x82z"), "\xF0\x9F\x99\x82z");
  EXPECT_EQ(stream.push("\xF0\x9F"), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  EXPECT_EQ(stream.finish(), "");
}

// A quadratic merge or a backtracking pattern takes 64 times as long for 8 times the text. The test
// compares times with each other, as seconds depend on the machine and its load.
TEST(Tokenizer, TimeGrowsWithTheText) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
  GTEST_SKIP() << "times say nothing here";
#endif
  constexpr size_t kBytes = 1 << 20, kTimes = 8;
  std::mt19937 random(1);
  std::string letters(kBytes, 'e');
  for (char& c : letters) c = "etaoinshrdlu"[random() % 12];
  const auto repeated = [](std::string_view part, size_t bytes) {
    std::string text;
    while (text.size() < bytes) text += part;
    return text;
  };
  const std::vector<std::function<std::string(size_t)>> texts = {
      [&](size_t bytes) { return letters.substr(0, bytes); },
      [&](size_t bytes) { return std::string(bytes, 'e'); },
      [&](size_t bytes) { return std::string(bytes, ' '); },
      [&](size_t bytes) { return std::string(bytes, ' ') + "x"; },
      [&](size_t bytes) { return repeated("\u0F73\u0301\u0323", bytes); },
      [&](size_t bytes) { return std::string(bytes, '\n'); },
      [&](size_t bytes) { return repeated("<|eos|", bytes); }};
  for (const char* style : {"models/llama/tokenizer", "tokenizer/llama3", "tokenizer/gpt4o"}) {
    const auto tokenizer =
        Tokenizer::open(fmt::format(FOVEA_SOURCE_DIR "/testdata/{}.json", style));
    const auto clocks_for = [&](const std::string& text) {
      const std::clock_t start = std::clock();
      EXPECT_GT(tokenizer.encode(text).size(), text.size() / 400);
      return static_cast<double>(std::clock() - start);
    };
    for (size_t i = 0; i < texts.size(); ++i) {
      const double few = clocks_for(texts[i](kBytes / kTimes));
      const double many = clocks_for(texts[i](kBytes));
      EXPECT_LT(many, 4 * kTimes * few + CLOCKS_PER_SEC / 4) << style << ", text " << i;
    }
  }
}

TEST(Tokenizer, RunawayPatternsAreAnError) {
  json document = model_json();
  const json bytes = document["pre_tokenizer"];
  document["pre_tokenizer"] = {{"type", "Sequence"},
                               {"pretokenizers",
                                {{{"type", "Split"},
                                  {"pattern", {{"Regex", "(?:(?:a|a)+)+b"}}},
                                  {"behavior", "Isolated"},
                                  {"invert", false}},
                                 bytes}}};
  const auto tokenizer = Tokenizer::parse(document.dump(), "tokenizer.json");
  EXPECT_FALSE(tokenizer.encode("aaab").empty());
  EXPECT_THROW(tokenizer.encode(std::string(100, 'a') + "xb"), Error);
  // The limit is the tokenizer's own, not PCRE2's: a text takes a third of 4^(length + 1) steps,
  // here 22 and 89 million.
  EXPECT_FALSE(tokenizer.encode(std::string(12, 'a') + "xb").empty());
  EXPECT_THROW(tokenizer.encode(std::string(13, 'a') + "xb"), Error);
}

// The llama tokenizer with the added tokens of a tokenizer_config.json.
TEST(Tokenizer, SettingsAddTokens) {
  const json settings = {
      {"added_tokens_decoder",
       {{"2048", {{"content", "<tool>"}, {"special", false}}},
        {"2049", {{"content", "<|eot|>"}, {"special", true}}},
        {"1", {{"content", "<|eos|>"}, {"special", false}, {"normalized", false}}}}},
      {"eos_token", "<|eot|>"},
      {"pad_token", {{"content", "<|pad|>"}}},
      {"bos_token", nullptr}};
  const auto tokenizer = Tokenizer::parse(model_json().dump(), "tokenizer.json", settings.dump());
  using Ids = std::vector<int32_t>;
  const Ids ids = tokenizer.encode("say<tool>x<|eot|>");
  EXPECT_EQ(ids, (Ids{84, 347, 2048, 89, 2049}));
  EXPECT_EQ(tokenizer.decode(ids), "say<tool>x");
  EXPECT_EQ(tokenizer.encode("<|pad|>"), Ids{2050});
  EXPECT_EQ(tokenizer.special_text(2050), "<|pad|>");
  EXPECT_EQ(tokenizer.special_text(1), "");  // the flags come from the settings
  EXPECT_EQ(tokenizer.size(), 2051);
  const auto refused = [&](const json& added, std::string_view part) {
    test::expect_error(ErrorCode::corrupt_file, {part}, [&] {
      Tokenizer::parse(model_json().dump(), "tokenizer.json",
                       json{{"added_tokens_decoder", added}}.dump());
    });
  };
  refused({{"7", {{"content", "<|eos|>"}}}}, "'<|eos|>' has id 1, tokenizer_config.json says 7");
  refused({{"x", {{"content", "new"}}}}, "added_tokens_decoder.x");
  refused({{"99999999", {{"content", "new"}}}}, "added_tokens_decoder.99999999");
  refused({{"5000", {{"content", ""}}}}, "added_tokens_decoder.5000.content");
}

}  // namespace
}  // namespace fovea
