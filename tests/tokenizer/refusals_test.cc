// SPDX-License-Identifier: Apache-2.0
// Tokenizer files that are refused, and the messages.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "support/expect_error.h"
#include "tokenizer/test_files.h"
#include "tokenizer/tokenizer.h"

namespace fovea {
namespace {

using nlohmann::json;

void expect_error(const json& document, ErrorCode code, std::string_view part) {
  test::expect_error(code, {"tokenizer.json: ", part},
                     [&] { Tokenizer::parse(document.dump(), "tokenizer.json"); });
}

// Expects an error that contains `part` for the model's tokenizer after one change.
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

TEST(TokenizerRefusals, RefusesByNameWhatWouldChangeIds) {
  expect_refused("'WordPiece'", [](json& j) { j["model"]["type"] = "WordPiece"; });
  expect_refused("dropout", [](json& j) { j["model"]["dropout"] = 0.1; });
  expect_refused("end_of_word_suffix", [](json& j) { j["model"]["end_of_word_suffix"] = "</w>"; });
  expect_refused("continuing_subword_prefix",
                 [](json& j) { j["model"]["continuing_subword_prefix"] = "##"; });
  expect_refused("'BertNormalizer'", [](json& j) {
    j["normalizer"] = {{"type", "BertNormalizer"}};
  });
  expect_refused("'BertPreTokenizer'", [](json& j) {
    j["pre_tokenizer"] = {{"type", "BertPreTokenizer"}};
  });
  expect_refused("'Merged'", [](json& j) {
    j["pre_tokenizer"] = {
        {"type", "Split"}, {"pattern", {{"String", " "}}}, {"behavior", "Merged"}};
  });
  expect_refused("'sometimes'", [](json& j) {
    j["pre_tokenizer"] = {{"type", "Metaspace"}, {"prepend_scheme", "sometimes"}};
  });
  expect_refused("'WordPiece'", [](json& j) { j["decoder"] = {{"type", "WordPiece"}}; });
  expect_refused("ByteLevel behind Fuse", [](json& j) {
    j["decoder"] = {{"type", "Sequence"},
                    {"decoders", {{{"type", "Fuse"}}, {{"type", "ByteLevel"}}}}};
  });
  expect_refused("'RobertaProcessing'", [](json& j) {
    j["post_processor"] = {{"type", "RobertaProcessing"}};
  });
  expect_refused("text once", [](json& j) { j["post_processor"]["single"] = json::array(); });
}

// Sets the pattern of a Split.
void set_pattern(json& document, const char* regex) {
  document["pre_tokenizer"] = {
      {"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}};
}

TEST(TokenizerRefusals, RefusesPatternsThatEnginesReadDifferently) {
  for (const char* regex :
       {"[[:alpha:]]+", "[a-z&&[^x]]", "[\\S]",  "^*a",      "(?s:a)",    "(?<name>a)",
        "(*SKIP)a",     "a{2}?",       "a{2}++", "a{,2}",    "\\p{Han}",  "\\pL",
        "[a-\\s]",      "\\x41",       "\\h",    "x*",       "[]a]",      "\\",
        "(?i:[\\s])",   "(?i:\\p{L})", "(?i:é)", "(?i:[é])", "(?i:fish)", "(?i:ss)",
        "\\u12",        "\\uD800",     "\\B"}) {
    expect_refused(" ", [&](json& j) { set_pattern(j, regex); });
  }
  for (const char* regex : {"(a", "a)", "[a", "*a"}) {
    expect_corrupt("pattern", [&](json& j) { set_pattern(j, regex); });
  }
}

// Messages truncate quotes of a file, and contain nothing that a terminal acts on.
TEST(TokenizerRefusals, MessagesQuoteFilesSafely) {
  const std::string hostile = "\x1b[2J" + std::string(100'000, 'x');
  const std::vector<std::function<void(json&)>> changes = {
      [&](json& j) { j["model"]["type"] = hostile; },
      [&](json& j) {
        j["normalizer"] = {{"type", hostile}};
      },
      [&](json& j) {
        j["pre_tokenizer"] = {{"type", hostile}};
      },
      [&](json& j) {
        j["decoder"] = {{"type", hostile}};
      },
      [&](json& j) {
        j["post_processor"] = {{"type", hostile}};
      },
      [&](json& j) { j["model"]["vocab"][hostile] = 2; },
      [&](json& j) { j["model"]["vocab"][hostile] = hostile; },
      [&](json& j) { j["model"]["merges"][0] = hostile; },
      [&](json& j) {
        j["model"]["merges"][0] = {hostile, "b"};
      },
      [&](json& j) { j["added_tokens"][0]["special"] = hostile; },
      [&](json& j) { j["added_tokens"] = hostile; },
      [&](json& j) {
        j[hostile.substr(0, 5000)] = 1;
        j["model"] = 7;
      },
      [&](json& j) { set_pattern(j, ("(" + hostile.substr(0, 5000)).c_str()); },
      [&](json& j) { set_pattern(j, ("\\p{" + hostile + "}").c_str()); },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    json document = model_json();
    changes[i](document);
    try {
      Tokenizer::parse(document.dump(), "tokenizer.json");
      ADD_FAILURE() << "change " << i << " is taken";
    } catch (const Error& error) {
      EXPECT_LT(std::string_view(error.what()).size(), 1000u) << i;
      EXPECT_EQ(std::string_view(error.what()).find('\x1b'), std::string_view::npos) << i;
    }
  }
}

// A file may put the same token around every text many times.
TEST(TokenizerRefusals, PostProcessorsAddAFewTokensOnly) {
  expect_corrupt("more than 1024 tokens", [](json& j) {
    const std::vector<int32_t> ids(20'000, 5);
    json pieces = json::array({{{"Sequence", {{"id", "A"}}}}});
    for (int i = 0; i < 2000; ++i) pieces.push_back({{"SpecialToken", {{"id", "x"}}}});
    j["post_processor"] = {{"type", "TemplateProcessing"},
                           {"single", pieces},
                           {"special_tokens", {{"x", {{"ids", ids}}}}}};
  });
}

TEST(TokenizerRefusals, RefusesBrokenFiles) {
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
