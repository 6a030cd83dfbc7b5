// SPDX-License-Identifier: Apache-2.0
// Reads the prompts of `generate` from flags and files, as text or as token ids.
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
  bool chat = false;                         // each text is a message in the chat format
  std::optional<std::string> system;         // the system message, used with `chat`
};

struct Prompt {
  std::string text;             // empty if the prompt is token ids
  std::vector<int32_t> tokens;  // empty if the prompt is text
};

void add_prompt_flags(CLI::App& command, PromptFlags& flags);

// Returns all prompts except random ones, in the order of the members of PromptFlags. Throws
// Error{invalid_argument} if there is none or a line is not UTF-8, and Error{io} if a file cannot
// be read.
std::vector<Prompt> read_prompts(const PromptFlags& flags);

// Appends the prompts of --random-prompts, whose ids are below the vocabulary size. Equal seeds
// give equal ids.
void append_random_prompts(const PromptFlags& flags, const Engine& engine, uint64_t seed,
                           std::vector<Prompt>& prompts);

}  // namespace fovea::cli
