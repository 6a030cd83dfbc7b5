// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/tokenizer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "fovea/error.h"
#include "support/expect_error.h"
#include "tokenizer/tokenizer_files.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

using nlohmann::json;

// The tokenizer of the test models: ByteLevel with the pattern of GPT-2.
const json& model_json() {
  static const json document = read_json("models/llama/tokenizer.json");
  return document;
}

const Tokenizer& model_tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::parse(model_json().dump(), "tokenizer.json");
  return tokenizer;
}

void expect_error(const json& document, ErrorCode code, std::string_view part) {
  test::expect_error(code, {"tokenizer.json: ", part},
                     [&] { Tokenizer::parse(document.dump(), "tokenizer.json"); });
}

// The model's tokenizer with one thing changed.
void expect_refused(std::string_view part, const std::function<void(json&)>& change) {
  json document = model_json();
  change(document);
  expect_error(document, ErrorCode::unsupported, part);
}
void expect_corrupt(std::string_view part, const std::function<void(json&)>& change) {
  json document = model_json();
  change(document);
  expect_error(document, ErrorCode::corrupt_file, part);
}

// Bytes of which many make characters, and many do not.
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

TEST(Tokenizer, TokenBytes) {
  const Tokenizer& tokenizer = model_tokenizer();
  ASSERT_EQ(tokenizer.size(), 2048);
  EXPECT_EQ(tokenizer.token_bytes(0), "");  // <|bos|> is special
  EXPECT_EQ(tokenizer.token_bytes(-1), "");
  EXPECT_EQ(tokenizer.token_bytes(2048), "");
  const auto tokens = tokenizer.encode("a<|eos|>b");
  ASSERT_EQ(tokens.size(), 3u);
  EXPECT_EQ(tokens[1], 1);
  EXPECT_EQ(tokenizer.decode(tokens), "ab");
  for (const int32_t token : tokenizer.encode("Hello  world")) {
    EXPECT_FALSE(tokenizer.token_bytes(token).empty());
  }
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

// A quadratic merge or a backtracking pattern takes 64 times as long for 8 times the text. Seconds
// say less: they are another machine's, or a neighbour's.
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

TEST(Tokenizer, RefusesByNameWhatWouldChangeIds) {
  expect_refused("truncation", [](json& j) { j["truncation"] = {{"max_length", 8}}; });
  expect_refused("padding", [](json& j) { j["padding"] = json::object(); });
  expect_refused("Unigram", [](json& j) { j["model"]["type"] = "Unigram"; });
  expect_refused("byte_fallback", [](json& j) { j["model"]["byte_fallback"] = true; });
  expect_refused("dropout", [](json& j) { j["model"]["dropout"] = 0.1; });
  expect_refused("end_of_word_suffix", [](json& j) { j["model"]["end_of_word_suffix"] = "</w>"; });
  expect_refused("continuing_subword_prefix",
                 [](json& j) { j["model"]["continuing_subword_prefix"] = "##"; });
  expect_refused("byte 0x21", [](json& j) {
    j["model"]["merges"] = json::array();
    j["model"]["vocab"].erase("!");
  });
  expect_refused("Lowercase", [](json& j) { j["normalizer"] = {{"type", "Lowercase"}}; });
  expect_refused("NFKC", [](json& j) {
    j["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFKC"}}}}};
  });
  expect_refused("no pre_tokenizer", [](json& j) { j["pre_tokenizer"] = nullptr; });
  expect_refused("Metaspace", [](json& j) { j["pre_tokenizer"] = {{"type", "Metaspace"}}; });
  expect_refused("without ByteLevel", [](json& j) { j["pre_tokenizer"] = {{"type", "Digits"}}; });
  expect_refused("after ByteLevel", [](json& j) {
    const json bytes = j["pre_tokenizer"];
    j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {bytes, bytes}}};
  });
  expect_refused("MergedWithNext", [](json& j) {
    j["pre_tokenizer"] = {
        {"type", "Split"}, {"pattern", {{"String", " "}}}, {"behavior", "MergedWithNext"}};
  });
  expect_refused("no decoder", [](json& j) { j["decoder"] = nullptr; });
  expect_refused("WordPiece", [](json& j) { j["decoder"] = {{"type", "WordPiece"}}; });
  expect_refused("RobertaProcessing", [](json& j) {
    j["post_processor"] = {{"type", "RobertaProcessing"}};
  });
  expect_refused("text once", [](json& j) { j["post_processor"]["single"] = json::array(); });
  expect_refused("single_word", [](json& j) { j["added_tokens"][0]["single_word"] = true; });
}

TEST(Tokenizer, RefusesPatternsThatEnginesReadDifferently) {
  for (const char* regex :
       {"\\w+",  "\\bx",     "[[:alpha:]]+", "[a-z&&[^x]]", "[\\S]",      "a.b",
        "^a",    "a$",       "(?s:a)",       "(?<name>a)",  "(*SKIP)a",   "a{2}+",
        "a{,2}", "\\p{Han}", "\\pL",         "[a-\\s]",     "(?i:[a-z])", "\\x41",
        "\\h",   "x*",       "[]a]",         "\\"}) {
    expect_refused(" ", [&](json& j) {
      j["pre_tokenizer"] = {
          {"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}};
    });
  }
  for (const char* regex : {"(a", "a)", "[a", "*a"}) {
    expect_corrupt("pattern", [&](json& j) {
      j["pre_tokenizer"] = {
          {"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}};
    });
  }
}

TEST(Tokenizer, RefusesBrokenFiles) {
  expect_corrupt("used by", [](json& j) { j["model"]["vocab"]["\""] = 2; });
  expect_corrupt("model.vocab.! is -1", [](json& j) { j["model"]["vocab"]["!"] = -1; });
  expect_corrupt("2097151", [](json& j) { j["model"]["vocab"]["!"] = 1 << 21; });
  expect_corrupt("1.5", [](json& j) { j["model"]["vocab"]["!"] = 1.5; });
  expect_corrupt("empty token", [](json& j) { j["model"]["vocab"][""] = 5000; });
  expect_corrupt("'zq' is not in", [](json& j) { j["model"]["merges"][3] = {"z", "q"}; });
  expect_corrupt("merges[3]", [](json& j) { j["model"]["merges"][3] = "a b c"; });
  expect_corrupt("merges[3]", [](json& j) { j["model"]["merges"][3] = {"a", "b", "c"}; });
  expect_corrupt("merges[3]", [](json& j) { j["model"]["merges"][3] = 7; });
  expect_corrupt("model is missing", [](json& j) { j.erase("model"); });
  expect_corrupt("model.vocab is missing", [](json& j) { j["model"].erase("vocab"); });
  expect_corrupt("'<|bos|>' has id 7", [](json& j) { j["added_tokens"][0]["id"] = 7; });
  expect_corrupt("id 7 is used by", [](json& j) {
    j["added_tokens"][0] = {{"id", 7}, {"content", "new"}};
  });
  expect_corrupt("twice", [](json& j) { j["added_tokens"].push_back(j["added_tokens"][0]); });
  expect_corrupt("0 bytes", [](json& j) { j["added_tokens"][0]["content"] = ""; });
  expect_corrupt("1025 bytes", [](json& j) {
    j["added_tokens"][0] = {{"id", 5000}, {"content", std::string(1025, 'x')}};
  });
  expect_corrupt("no token", [](json& j) {
    j["post_processor"]["single"].push_back({{"SpecialToken", {{"id", "x"}}}});
    j["post_processor"]["special_tokens"] = {{"x", {{"ids", {9999}}}}};
  });
  expect_corrupt("special_tokens.x is missing", [](json& j) {
    j["post_processor"]["single"].push_back({{"SpecialToken", {{"id", "x"}}}});
  });
  EXPECT_THROW(Tokenizer::parse("{", "tokenizer.json"), Error);
  EXPECT_THROW(Tokenizer::parse("[]", "tokenizer.json"), Error);
  EXPECT_THROW(Tokenizer::open(FOVEA_SOURCE_DIR "/testdata/none.json"), Error);
}

}  // namespace
}  // namespace fovea
