// SPDX-License-Identifier: Apache-2.0
// The files that describe a tokenizer.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/tokenizer_parts.h"

namespace fovea {

// What a tokenizer_config.json adds to the other files.
struct TokenizerSettings {
  std::vector<AddedToken> added;         // by ascending id
  std::vector<AddedToken> named;         // bos_token, eos_token, ...; their ids are not known
  std::optional<bool> add_bos, add_eos;  // asked of a tokenizer.model; a tokenizer.json has its own
};

// Error{corrupt_file} or {unsupported}; `name` is the file.
TokenizerParts read_tokenizer_json(std::string_view json, std::string_view name,
                                   const TokenizerSettings& settings);
TokenizerSettings read_tokenizer_settings(std::string_view json, std::string_view name);
// The added tokens of another file together with those of the settings. Where both have a token,
// its flags are those of the settings.
std::vector<AddedToken> with_settings(std::vector<AddedToken> tokens, const Vocabulary& vocabulary,
                                      const TokenizerSettings& settings, std::string_view name);
// A tokenizer.model of sentencepiece: BPE or unigram.
TokenizerParts read_sentencepiece(std::string_view bytes, std::string_view name,
                                  const TokenizerSettings& settings);

}  // namespace fovea
