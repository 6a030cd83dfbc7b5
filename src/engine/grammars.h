// SPDX-License-Identifier: Apache-2.0
// The grammars of requests with a JSON schema.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tokenizer/grammar/grammar.h"
#include "tokenizer/tokenizer.h"

namespace fovea {

// Compiles schemas, and keeps the last ones for requests that share them. Thread-safe.
class Grammars {
 public:
  static constexpr size_t kKept = 16;

  // `vocabulary` is the number of the model's logits.
  Grammars(const Tokenizer& tokenizer, int32_t vocabulary)
      : tokenizer_(tokenizer), vocabulary_(vocabulary) {}

  // Throws Error{invalid_argument} with the place in the schema and the keyword.
  std::shared_ptr<const grammar::Grammar> compile(const std::string& schema);

 private:
  const Tokenizer& tokenizer_;
  int32_t vocabulary_;
  std::mutex mutex_;
  std::shared_ptr<const grammar::TokenTrie> tokens_;  // set by the first schema
  // Schemas with their grammars; the last used is the last.
  std::vector<std::pair<std::string, std::shared_ptr<const grammar::Grammar>>> kept_;
};

}  // namespace fovea
