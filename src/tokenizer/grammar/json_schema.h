// SPDX-License-Identifier: Apache-2.0
// Compiles a JSON schema to an automaton whose texts are values that the schema allows.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/grammar/automaton.h"
#include "tokenizer/grammar/json_parts.h"

namespace fovea::grammar {

class SchemaCompiler {
 public:
  static constexpr size_t kMaxBytes = 100'000;
  static constexpr int kMaxDepth = 64;

  // Returns the first node of the whole text. Throws Error{invalid_argument} with the place and the
  // keyword that is wrong or not supported.
  static int32_t compile(std::string_view schema, Automaton& automaton);

 private:
  using Json = nlohmann::ordered_json;

  SchemaCompiler(const Json& root, Automaton& automaton)
      : root_(root), automaton_(automaton), parts_(automaton) {}

  int32_t schema(const Json& schema, const std::string& place, int32_t next);
  int32_t typed(const Json& schema, const std::string& type, const std::string& place,
                int32_t next);
  int32_t reference(const Json& schema, const std::string& place, int32_t next);
  int32_t choices(const Json& schema, const char* keyword, const std::string& place, int32_t next);
  int32_t constants(const Json& schema, const std::string& place, int32_t next);
  int32_t constant(const Json& value, int32_t next);
  int32_t object(const Json& schema, const std::string& place, int32_t next);
  int32_t members(const Json& schema, const std::string& place, int32_t next);
  int32_t array(const Json& schema, const std::string& place, int32_t next);
  int32_t string(const Json& schema, const std::string& place, int32_t next);
  int32_t integer(const Json& schema, const std::string& place, int32_t next);

  std::vector<std::string> types_of(const Json& schema, const std::string& place) const;
  // Throws if the schema has a keyword that is neither an annotation nor in `allowed`.
  void check_keywords(const Json& schema, const std::vector<std::string_view>& allowed,
                      const std::string& place) const;
  void check_disjoint(const Json& choices, const std::string& place) const;
  // Returns the schema without references.
  const Json& resolved(const Json& schema, const std::string& place) const;

  const Json& root_;
  Automaton& automaton_;
  JsonParts parts_;
  std::map<std::string, int32_t> rules_;  // the rules of references
  std::set<std::string> unfinished_;      // references whose rules are being built
  int depth_ = 0;
};

}  // namespace fovea::grammar
