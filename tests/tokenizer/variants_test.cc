// SPDX-License-Identifier: Apache-2.0
// Every kind of step of a tokenizer.json compared with the PyPI package `tokenizers`, and
// tokenizer.model compared with `sentencepiece`, from testdata/tokenizer/variants_*.json
// (tools/make_tokenizer_variants.py).
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "tokenizer/checksums.h"
#include "tokenizer/test_files.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;

// Returns the texts and variants of a table of goldens, by the name of the table.
const json& tokenizer_table(const std::string& name) {
  static std::map<std::string, json> tables;
  json& found = tables[name];
  if (found.is_null()) found = read_json("tokenizer/" + name + ".json");
  return found;
}

struct Variant {
  std::string table;
  size_t index = 0;

  const json& golden() const { return tokenizer_table(table)["variants"][index]; }
  std::string name() const { return golden()["name"].get<std::string>(); }
  // For messages of the test framework.
  friend void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name(); }
};

std::vector<Variant> all_variants() {
  std::vector<Variant> variants;
  for (const char* name : {"variants_bytes", "variants_added", "variants_spaced"}) {
    for (size_t i = 0; i < tokenizer_table(name)["variants"].size(); ++i)
      variants.push_back({name, i});
  }
  return variants;
}

// Applies a variant's patch to its base. Fields of the model are patched one by one.
Tokenizer make_variant(const json& variant) {
  json document = read_json("tokenizer/base_" + variant["base"].get<std::string>() + ".json");
  for (const auto& [field, value] : variant["patch"].items()) {
    if (field == "model") {
      document["model"].update(value);
    } else {
      document[field] = value;
    }
  }
  return Tokenizer::parse(document.dump(), variant["name"].get<std::string>());
}

// Returns the joined pieces of text of one token after another.
std::string streamed(const Tokenizer& tokenizer, const Ids& ids) {
  TokenStream stream = tokenizer.stream();
  std::string text;
  for (const int32_t id : ids) {
    const std::string piece = stream.push(id);
    EXPECT_EQ(replace_broken_utf8(piece), piece);
    text += piece;
  }
  return text + stream.finish();
}

class TokenizerVariants : public testing::TestWithParam<Variant> {};

TEST_P(TokenizerVariants, IdsAndTextsAreThoseOfTheReference) {
  const json& variant = GetParam().golden();
  const Tokenizer tokenizer = make_variant(variant);
  const json& texts = tokenizer_table(GetParam().table)["texts"];
  ASSERT_GE(texts.size(), 10u);
  ASSERT_EQ(texts.size(), variant["ids"].size());
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto text = texts[i].get<std::string>();
    const auto ids = variant["ids"][i].get<Ids>();
    EXPECT_EQ(tokenizer.encode(text), ids) << texts[i];
    const json decoded = variant["decoded"].value(std::to_string(i), json(text));
    if (decoded.is_null()) continue;
    EXPECT_EQ(tokenizer.decode(ids), decoded.get<std::string>()) << texts[i];
    EXPECT_EQ(streamed(tokenizer, ids), decoded.get<std::string>()) << texts[i];
  }
}

TEST_P(TokenizerVariants, AnyIdsDecodeAsByTheReference) {
  const json& variant = GetParam().golden();
  const Tokenizer tokenizer = make_variant(variant);
  for (size_t i = 0; i < variant["any_ids"].size(); ++i) {
    const auto ids = variant["any_ids"][i].get<Ids>();
    const json& decoded = variant["any_decoded"][i];
    if (decoded.is_null()) continue;
    EXPECT_EQ(tokenizer.decode(ids), decoded.get<std::string>());
    EXPECT_EQ(streamed(tokenizer, ids), decoded.get<std::string>());
  }
}

TEST_P(TokenizerVariants, RandomTextsHaveTheIdsOfTheReference) {
  constexpr int kTextsOfBlock = 4096;
  const json& variant = GetParam().golden();
  const Tokenizer tokenizer = make_variant(variant);
  test::RandomTexts texts(0);
  uint32_t crc = ~0u;
  for (int i = 0; i < kTextsOfBlock; ++i) crc = test::crc32(crc, tokenizer.encode(texts.next()));
  EXPECT_EQ(~crc, variant["random"].get<uint32_t>());
}

TEST_P(TokenizerVariants, AnyBytesAreEncodedAsTheirReplacement) {
  const Tokenizer tokenizer = make_variant(GetParam().golden());
  for (const std::string text :
       {"a\xFF b", "\xE2\x82", "\xED\xA0\x80 \xC0\xAF", "x\xF0\x9F\x99 y", "\x80\x80"}) {
    EXPECT_EQ(tokenizer.encode(text), tokenizer.encode(replace_broken_utf8(text)));
    const Ids ids = tokenizer.encode(text);
    EXPECT_EQ(streamed(tokenizer, ids), tokenizer.decode(ids));
  }
}

INSTANTIATE_TEST_SUITE_P(All, TokenizerVariants, testing::ValuesIn(all_variants()),
                         [](const auto& variant) { return variant.param.name(); });

class SentencepieceModels : public testing::TestWithParam<const char*> {};

TEST_P(SentencepieceModels, IdsAreThoseOfTheReference) {
  const auto tokenizer =
      Tokenizer::open(std::string(FOVEA_SOURCE_DIR "/testdata/tokenizer/") + GetParam() + ".model");
  const json& golden = tokenizer_table("sentencepiece")[GetParam()];
  ASSERT_GT(golden["texts"].size(), 100u);
  for (size_t i = 0; i < golden["texts"].size(); ++i) {
    const auto text = golden["texts"][i].get<std::string>();
    const auto ids = golden["ids"][i].get<Ids>();
    EXPECT_EQ(tokenizer.encode(text), ids) << golden["texts"][i];
    EXPECT_EQ(streamed(tokenizer, ids), tokenizer.decode(ids));
  }
}

INSTANTIATE_TEST_SUITE_P(All, SentencepieceModels, testing::Values("llama_bpe", "mapped_unigram"),
                         [](const auto& model) { return std::string(model.param); });

}  // namespace
}  // namespace fovea
