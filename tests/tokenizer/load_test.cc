// SPDX-License-Identifier: Apache-2.0
// Time and memory for large tokenizer files.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ctime>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fovea/error.h"
#include "tokenizer/test_files.h"
#include "tokenizer/tokenizer.h"

namespace fovea {
namespace {

using nlohmann::json;

// Returns the peak resident memory of a child process that calls the function.
size_t peak_of_child(const std::function<void()>& function) {
  const pid_t child = fork();
  if (child == 0) {
    function();
    _exit(0);
  }
  int status = 0;
  rusage usage{};
  EXPECT_EQ(wait4(child, &status, 0, &usage), child);
  EXPECT_TRUE(WIFEXITED(status));
  return static_cast<size_t>(usage.ru_maxrss) * 1024;
}

// Returns by how much the function raises this process's peak memory.
size_t peak_bytes(const std::function<void()>& function) {
  const size_t before = peak_of_child([] {});
  const size_t peak = peak_of_child(function);
  return peak > before ? peak - before : 0;
}

// Vocabularies of a million tokens, and files with 100,000 added tokens.
TEST(TokenizerLoad, LargeFilesLoadInSeconds) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
  GTEST_SKIP() << "times say nothing here";
#endif
  const auto seconds_to_load = [](const std::string& text) {
    const std::clock_t start = std::clock();
    Tokenizer::parse(text, "tokenizer.json");
    return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  };
  json document = model_json();
  for (int i = 0; i < 100'000; ++i) {
    document["added_tokens"].push_back(
        {{"id", 2048 + i}, {"content", fmt::format("<|token {}|>", i)}, {"special", i % 2 == 0}});
  }
  EXPECT_LT(seconds_to_load(document.dump()), 2.0);

  document = model_json();
  std::string vocab, merges;
  for (const auto& [token, id] : document["model"]["vocab"].items()) {
    vocab += fmt::format("{}:{},", json(token).dump(), id.get<int>());
  }
  for (int i = 0; i < 500'000; ++i) {
    vocab += fmt::format("\"q{0}\":{1},\"q{0}!\":{2},", i, 10'000 + i, 510'000 + i);
    merges += fmt::format("[\"q{0}\",\"!\"],", i);
  }
  vocab.pop_back();
  merges.pop_back();
  document["model"]["vocab"] = "VOCAB";
  document["model"]["merges"] = "MERGES";
  std::string text = document.dump();
  text.replace(text.find("\"VOCAB\""), 7, "{" + vocab + "}");
  text.replace(text.find("\"MERGES\""), 8, "[" + merges + "]");
  EXPECT_LT(seconds_to_load(text), 2.0);
}

// Memory is a small multiple of the file, wherever the file holds its strings.
TEST(TokenizerLoad, MemoryIsAFewTimesTheFile) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers keep what is freed";
#endif
  constexpr int kStrings = 1'000'000;
  const std::string base = model_json().dump();
  const auto with = [&](std::string_view place, const auto& item) {
    std::string text(place);
    for (int i = 0; i < kStrings; ++i) text += item(i);
    return text;
  };
  const auto tokens = [](int i) { return fmt::format("{}\"token {}\"", i ? "," : "", i); };
  const std::vector<std::string> files = {
      with("{\"nobody knows this\":[", tokens) + "]," + base.substr(1),
      with("{\"truncation\":{\"a\":[", tokens) + "]}," + base.substr(1),
      with("{\"model\":{\"vocab\":{",
           [](int i) { return fmt::format("{}\"token {}\":{}", i ? "," : "", i, i); }) +
          "},\"merges\":[]}}",
      with("{\"model\":{\"type\":\"Unigram\",\"vocab\":[",
           [](int i) { return fmt::format("{}[\"token {}\",-{}.5]", i ? "," : "", i, i % 10); }) +
          "]}}",
      with("{\"model\":{\"vocab\":{},\"merges\":[",
           [](int i) { return fmt::format("{}\"a{} b\"", i ? "," : "", i); }) +
          "]}}",
      with("{\"normalizer\":{\"type\":\"NFC\",\"a\":[", tokens) + "]}," + base.substr(1),
      "{\"normalizer\":{\"type\":\"" + std::string(16 << 20, 'x') + "\"}," + base.substr(1),
  };
  for (size_t i = 0; i < files.size(); ++i) {
    const size_t peak = peak_bytes([&] {
      try {
        Tokenizer::parse(files[i], "tokenizer.json");
      } catch (const Error&) {
      }
    });
    EXPECT_LT(peak, files[i].size() * 8 + (4 << 20)) << "file " << i << " of " << files[i].size();
  }
}

}  // namespace
}  // namespace fovea
