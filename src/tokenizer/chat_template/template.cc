// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/chat_template/template.h"

#include "core/check.h"
#include "tokenizer/chat_template/interpreter.h"
#include "tokenizer/chat_template/parser.h"

namespace fovea::jinja {

struct Template::Parsed {
  std::string name;
  TemplateLimits limits;
  Block block;
};

Template Template::parse(std::string_view source, std::string_view name,
                         const TemplateLimits& limits) {
  if (source.size() > limits.source_bytes) {
    fail(ErrorCode::unsupported, "{}: the template has {} bytes, the limit is {}", name,
         source.size(), limits.source_bytes);
  }
  try {
    Template result;
    result.parsed_ = std::make_shared<const Parsed>(
        Parsed{std::string(name), limits, Parser(tokenize(source)).parse()});
    return result;
  } catch (const SyntaxProblem& problem) {
    fail(ErrorCode::unsupported, "{}, line {}: {}", name, problem.line, problem.message);
  } catch (const Failure& problem) {
    fail(ErrorCode::unsupported, "{}: {}", name, problem.message);
  }
}

std::string Template::render(const Dict& variables) const {
  Interpreter interpreter(parsed_->limits);
  try {
    return interpreter.run(parsed_->block, variables);
  } catch (const Failure& failure) {
    fail(ErrorCode::invalid_argument, "{}, line {}: {}", parsed_->name, interpreter.line(),
         failure.message);
  }
}

}  // namespace fovea::jinja
