// SPDX-License-Identifier: Apache-2.0
// The prompts of `generate`: from flags, from files, as text or as token ids.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fovea/engine.h"

namespace fovea::cli {

struct PromptFlags {
  std::vector<std::string> texts;            // --prompt
  std::optional<std::string> text_file;      // --prompt-file; "-" is standard input
  std::optional<std::string> lines_file;     // --prompts; "-" is standard input
  std::vector<std::vector<int32_t>> tokens;  // --tokens
  std::optional<std::string> random;         // --random-prompts
  bool chat = false;                         // every text is a message in the chat format
  std::optional<std::string> system;         // with chat: the message before it
};

struct Prompt {
  std::string text;             // empty where the prompt is token ids
  std::vector<int32_t> tokens;  // empty where it is text
};

void add_prompt_flags(CLI::App& command, PromptFlags& flags);

// All prompts but random ones, in the order of PromptFlags's members. Error{invalid_argument} where
// there is none or a line is not UTF-8, Error{io} where a file cannot be read.
std::vector<Prompt> read_prompts(const PromptFlags& flags);

// Adds those of --random-prompts, whose ids the vocabulary bounds. The same seed gives the same
// ids.
void append_random_prompts(const PromptFlags& flags, const Engine& engine, uint64_t seed,
                           std::vector<Prompt>& prompts);

}  // namespace fovea::cli
