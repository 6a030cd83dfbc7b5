// SPDX-License-Identifier: Apache-2.0
// Ids and texts compared with those of the PyPI package `tokenizers`, stored in testdata/tokenizer
// by tools/make_tokenizer_goldens.py.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tokenizer/checksums.h"
#include "tokenizer/test_files.h"
#include "tokenizer/tokenizer.h"

namespace fovea {
namespace {

using nlohmann::json;
using test::at_any_scale;
using test::crc32;
using test::RandomTexts;

class TokenizerGoldens : public testing::TestWithParam<std::string> {};

TEST_P(TokenizerGoldens, IdsAndTextsAreThoseOfTheReference) {
  const std::string path = fmt::format("tokenizer/{}.json", GetParam());
  const auto tokenizer = Tokenizer::open(FOVEA_SOURCE_DIR "/testdata/" + path);
  const json goldens = read_json("tokenizer/goldens.json");
  const json& texts = goldens["texts"];
  const json& ids = goldens["ids"][GetParam()];
  const json& decoded = goldens["decoded"][GetParam()];
  ASSERT_GT(texts.size(), 100u);
  ASSERT_EQ(texts.size(), ids.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto text = texts[i].get<std::string>();
    const auto expected = ids[i].get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer.encode(text), expected) << texts[i];
    EXPECT_EQ(tokenizer.decode(expected), decoded.value(std::to_string(i), text));
  }
}

// Chat formats write special tokens themselves.
TEST(Tokenizer, EncodesBareTextWithoutThePostProcessor) {
  for (const std::string name : {"llama3", "gpt4o"}) {
    const auto tokenizer =
        Tokenizer::open(FOVEA_SOURCE_DIR "/testdata/tokenizer/" + name + ".json");
    const std::vector<int32_t> around = tokenizer.encode(""),
                               framed = tokenizer.encode("of Israel");
    const std::vector<int32_t> bare = tokenizer.encode_bare("of Israel");
    EXPECT_TRUE(tokenizer.encode_bare("").empty());
    EXPECT_GT(around.size(), 0u);
    EXPECT_EQ(framed.size(), around.size() + bare.size());
    EXPECT_FALSE(std::ranges::search(framed, bare).empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Styles, TokenizerGoldens,
                         testing::Values("gpt2", "llama3", "qwen", "gpt4o", "deepseek", "digits"),
                         [](const auto& style) { return style.param; });

// Compares the checksums of the ids of a text around every character with the reference's.
template <typename Text>
void expect_blocks(const Tokenizer& tokenizer, const json& checks, const Text& text_of) {
  constexpr uint32_t kBlock = 16384;
  // Beyond plane 3 only a few format characters are assigned.
  const uint32_t blocks = at_any_scale() ? 0x110000 / kBlock : 0x34000 / kBlock;
  for (uint32_t block = 0; block < blocks; ++block) {
    uint32_t crc = ~0u;
    for (uint32_t point = block * kBlock; point < (block + 1) * kBlock; ++point) {
      if (point >= 0xD800 && point < 0xE000) continue;
      crc = crc32(crc, tokenizer.encode(text_of(utf8(point))));
    }
    EXPECT_EQ(~crc, checks[block].get<uint32_t>()) << "block " << block;
  }
}

// A million texts at any scale above 1.
TEST(TokenizerBlocks, RandomTextsHaveTheIdsOfTheReference) {
  constexpr int kTextsOfBlock = 4096;
  const json goldens = read_json("tokenizer/goldens.json");
  for (const auto& [style, checks] : goldens["random"].items()) {
    SCOPED_TRACE(style);
    const auto tokenizer =
        Tokenizer::open(fmt::format(FOVEA_SOURCE_DIR "/testdata/tokenizer/{}.json", style));
    const size_t blocks = at_any_scale() ? checks.size() : 2;
    for (size_t block = 0; block < blocks; ++block) {
      RandomTexts texts(block);
      uint32_t crc = ~0u;
      for (int i = 0; i < kTextsOfBlock; ++i) crc = crc32(crc, tokenizer.encode(texts.next()));
      EXPECT_EQ(~crc, checks[block].get<uint32_t>()) << "block " << block;
    }
  }
}

// The tokens around a character show how the pattern classifies it. make_tokenizer_goldens.py has
// the same text and the same blocks.
TEST(TokenizerBlocks, EveryCodePointIsSplitAsByTheReference) {
  const json goldens = read_json("tokenizer/goldens.json");
  ASSERT_GE(goldens["code_points"].size(), 4u);
  for (const auto& [style, checks] : goldens["code_points"].items()) {
    json document = read_json("tokenizer/codepoints.json");
    document["pre_tokenizer"] = read_json(fmt::format("tokenizer/{}.json", style))["pre_tokenizer"];
    SCOPED_TRACE(style);
    expect_blocks(Tokenizer::parse(document.dump(), style), checks, [](const std::string& c) {
      return fmt::format("a{0}A{0}{0} {0}1{0}!{0}\n{0}", c);
    });
  }
}

// Shows whether a character is a mark, its compositions and its order among marks.
TEST(TokenizerBlocks, EveryCodePointIsNormalisedAsByTheReference) {
  const Tokenizer tokenizer =
      Tokenizer::open(std::string(FOVEA_SOURCE_DIR) + "/testdata/tokenizer/qwen.json");
  expect_blocks(tokenizer, read_json("tokenizer/goldens.json")["marks"], [](const std::string& c) {
    return fmt::format("e{0}\u0301 a\u0301{0}\u0334 \u1100{0} \U00011935{0}", c);
  });
}

}  // namespace
}  // namespace fovea
