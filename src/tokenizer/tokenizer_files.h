// SPDX-License-Identifier: Apache-2.0
// Readers for the files that describe a tokenizer.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/tokenizer_parts.h"

namespace fovea {

// Additions of a tokenizer_config.json to the other files.
struct TokenizerSettings {
  std::vector<AddedToken> added;         // ids ascend
  std::vector<AddedToken> named;         // bos_token, eos_token, ...; their ids are not set
  std::optional<bool> add_bos, add_eos;  // apply to a tokenizer.model; a tokenizer.json has its own
};

// Throws Error{corrupt_file} or {unsupported}; `name` is the file.
TokenizerParts read_tokenizer_json(std::string_view json, std::string_view name,
                                   const TokenizerSettings& settings);
TokenizerSettings read_tokenizer_settings(std::string_view json, std::string_view name);
// Merges the added tokens of another file with those of the settings. If both have a token, its
// flags come from the settings.
std::vector<AddedToken> with_settings(std::vector<AddedToken> tokens, const Vocabulary& vocabulary,
                                      const TokenizerSettings& settings, std::string_view name);
// Reads a tokenizer.model of sentencepiece: BPE or unigram.
TokenizerParts read_sentencepiece(std::string_view bytes, std::string_view name,
                                  const TokenizerSettings& settings);

}  // namespace fovea
