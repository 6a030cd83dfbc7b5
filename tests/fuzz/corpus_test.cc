// SPDX-License-Identifier: Apache-2.0
// Replays the corpus of the fuzzers. make_corpus.py explains the file names.
#include <gtest/gtest.h>

#include <filesystem>
#include <optional>

#include "core/mapped_file.h"
#include "fuzz/targets.h"

namespace fovea {
namespace {

using Target = void (*)(std::span<const uint8_t>);

// Returns the error of each file of the folder, by name; nullopt if there was none.
std::map<std::string, std::optional<std::string>> replay(const std::string& folder, Target target) {
  std::map<std::string, std::optional<std::string>> errors;
  for (const auto& entry :
       std::filesystem::directory_iterator(FOVEA_SOURCE_DIR "/tests/fuzz/corpus/" + folder)) {
    const MappedFile file(entry.path().string());
    const auto bytes = file.bytes();
    auto& error = errors[entry.path().filename().string()];
    try {
      target({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
    } catch (const Error& caught) {
      error = caught.what();
    }
  }
  return errors;
}

void expect_promises(const std::map<std::string, std::optional<std::string>>& errors) {
  EXPECT_GT(errors.size(), 10u);
  for (const auto& [name, error] : errors) {
    EXPECT_EQ(error.has_value(), name.starts_with("bad_")) << name << ": " << error.value_or("");
  }
}

TEST(Corpus, Safetensors) {
  const auto errors = replay("safetensors", fuzz::read_safetensors);
  expect_promises(errors);
  for (const auto& [name, error] : errors) {
    if (!error) continue;
    EXPECT_EQ(error->rfind("fuzz.safetensors: ", 0), 0u) << *error;
    if (name.starts_with("bad_file_")) continue;
    EXPECT_NE(error->find("'weights'"), error->npos) << name << ": " << *error;
  }
}

TEST(Corpus, Config) { expect_promises(replay("config", fuzz::read_config)); }

TEST(Corpus, Index) { expect_promises(replay("index", fuzz::read_index)); }

TEST(Corpus, Sentencepiece) { expect_promises(replay("sentencepiece", fuzz::read_sentencepiece)); }

TEST(Corpus, ChatTemplate) { expect_promises(replay("chat_template", fuzz::read_chat_template)); }

TEST(Corpus, JsonSchema) { expect_promises(replay("json_schema", fuzz::read_json_schema)); }

TEST(Corpus, ToolCalls) {
  for (const auto& [name, error] : replay("tool_calls", fuzz::read_tool_calls)) {
    EXPECT_FALSE(error.has_value()) << name << ": " << *error;
  }
}

TEST(Corpus, Tokenizer) { expect_promises(replay("tokenizer", fuzz::read_tokenizer)); }

}  // namespace
}  // namespace fovea
