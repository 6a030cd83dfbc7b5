// SPDX-License-Identifier: Apache-2.0
// Cuts a template into tokens, as jinja2 does with trim_blocks and lstrip_blocks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fovea::jinja {

enum class TokenKind : uint8_t {
  data,            // text outside of marks
  variable_begin,  // {{
  variable_end,
  block_begin,  // {%
  block_end,
  name,
  text,  // a string, without quotes and escapes
  integer,
  number,  // with a fraction or an exponent
  sign,    // an operator or a bracket
  end,     // the end of the template
};

struct Token {
  TokenKind kind = TokenKind::end;
  int line = 0;
  std::string text = {};
};

// A problem of the source; Template adds its name.
struct SyntaxProblem {
  int line = 0;
  std::string message;
};

// Ends with a token of kind `end`. Throws SyntaxProblem.
std::vector<Token> tokenize(std::string_view source);

}  // namespace fovea::jinja
