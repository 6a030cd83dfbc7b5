// SPDX-License-Identifier: Apache-2.0
// A Jinja template as checkpoints use them for chats. Results equal those of jinja2 as the PyPI
// package `transformers` configures it: trim_blocks, lstrip_blocks, loop controls, an immutable
// sandbox.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace fovea::jinja {

class Dict;

struct TemplateLimits {
  size_t source_bytes = 1'000'000;
  size_t steps = 1'000'000;           // evaluated expressions, statements and items of lists
  size_t text_bytes = 1'000'000'000;  // texts made while rendering, all together
  size_t output_bytes = 64'000'000;
};

class Template {
 public:
  // Throws Error{unsupported} with `name`, the line and the problem.
  static Template parse(std::string_view source, std::string_view name,
                        const TemplateLimits& limits = {});

  // Thread-safe. Throws Error{invalid_argument} with the template's name, the line and the problem,
  // which may come from the template's own raise_exception().
  std::string render(const Dict& variables) const;

 private:
  struct Parsed;
  std::shared_ptr<const Parsed> parsed_;
};

}  // namespace fovea::jinja
