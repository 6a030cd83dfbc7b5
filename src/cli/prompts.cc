// SPDX-License-Identifier: Apache-2.0
#include "cli/prompts.h"

#include <fmt/core.h>
#include <utf8proc.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <memory>
#include <random>
#include <string_view>
#include <system_error>

#include "cli/commands.h"
#include "fovea/error.h"

namespace fovea::cli {
namespace {

std::string read_file(std::string_view flag, const std::string& path) {
  // Uses the C API, because a C++ stream throws for a folder. Pipes work too.
  const std::unique_ptr<FILE, int (*)(FILE*)> file(
      path == "-" ? stdin : std::fopen(path.c_str(), "rb"), std::fclose);
  std::string text;
  std::array<char, 1 << 16> block;
  for (size_t size = 0; file && (size = std::fread(block.data(), 1, block.size(), file.get())) > 0;)
    text.append(block.data(), size);
  if (!file || std::ferror(file.get())) {
    throw Error(ErrorCode::io,
                fmt::format("{} {}: {}", flag, path, std::generic_category().message(errno)));
  }
  return text;
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    utf8proc_int32_t character = 0;
    const utf8proc_ssize_t length =
        utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                         static_cast<utf8proc_ssize_t>(text.size()), &character);
    if (length <= 0) return false;
    text.remove_prefix(static_cast<size_t>(length));
  }
  return true;
}

// Reads one prompt per line. Windows files may begin with a byte order mark and end lines with \r
// .
void append_lines(const std::string& path, std::vector<Prompt>& prompts) {
  const std::string text = read_file("--prompts", path);
  std::string_view rest = text;
  if (constexpr std::string_view kMark = "\xEF\xBB\xBF"; rest.starts_with(kMark))
    rest.remove_prefix(kMark.size());
  const size_t before = prompts.size();
  for (size_t number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    if (!is_utf8(line)) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--prompts {}: line {} is not UTF-8", path, number));
    }
    prompts.push_back({.text = std::string(line)});
  }
  if (prompts.size() == before) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--prompts {}: no line contains a prompt", path));
  }
}

// The value of --random-prompts.
struct PromptSizes {
  int32_t prompts = 0, tokens = 0;
};

// Parses "8x512", or "512" for one prompt.
PromptSizes parse_prompt_sizes(const std::string& text) {
  const auto number = [](std::string_view digits) {
    int32_t value = 0;
    const char* const end = digits.data() + digits.size();
    const auto [rest, error] = std::from_chars(digits.data(), end, value);
    return error == std::errc{} && rest == end ? value : 0;
  };
  const size_t cross = text.find('x');
  const std::string_view whole = text;
  const PromptSizes sizes = cross == text.npos ? PromptSizes{1, number(whole)}
                                               : PromptSizes{number(whole.substr(0, cross)),
                                                             number(whole.substr(cross + 1))};
  if (sizes.prompts > 0 && sizes.tokens > 0) return sizes;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("--random-prompts is '{}', must be a number of tokens, or of prompts and "
                          "of tokens in each like 8x512, both from 1 to 2^31 - 1",
                          text));
}

}  // namespace

void add_prompt_flags(CLI::App& command, PromptFlags& flags) {
  add_list(command, "--prompt,-p", flags.texts, "text to continue; repeat it for a batch");
  command.add_option("--prompt-file", flags.text_file,
                     "file with the text of one prompt; - is standard input");
  command.add_option("--prompts", flags.lines_file,
                     "file with a prompt on each line that is not empty; - is standard input");
  const auto read = [&flags](const CLI::results_t& given) {
    for (const std::string& text : given) {
      std::vector<int32_t>& tokens = flags.tokens.emplace_back();
      for (const std::string& entry : split_list("--tokens", text)) {
        if (!CLI::detail::lexical_cast(entry, tokens.emplace_back())) return false;
      }
    }
    return true;
  };
  command
      .add_option("--tokens", read, "token ids to continue, comma-separated; repeat it for a batch")
      ->type_name("INT,...")
      ->expected(1, CLI::detail::expected_max_vector_size)
      ->allow_extra_args(false);
  command.add_option("--random-prompts", flags.random,
                     "NxM: N prompts of M random token ids, made from --seed");
  command.add_flag("--chat", flags.chat,
                   "treat each prompt as a message in the checkpoint's chat format; print only the "
                   "answers");
  command.add_option("--system", flags.system,
                     "with --chat: the system message; default: the template's own");
}

std::vector<Prompt> read_prompts(const PromptFlags& flags) {
  if (flags.text_file == "-" && flags.lines_file == "-") {
    throw Error(ErrorCode::invalid_argument,
                "--prompt-file and --prompts are both '-', but there is one standard input");
  }
  if (flags.chat && (!flags.tokens.empty() || flags.random)) {
    throw Error(ErrorCode::invalid_argument,
                "--chat needs text, but --tokens and --random-prompts are ids");
  }
  if (flags.system && !flags.chat) {
    throw Error(ErrorCode::invalid_argument, "--system needs --chat");
  }
  std::vector<Prompt> prompts;
  for (const std::string& text : flags.texts) prompts.push_back({.text = text});
  if (flags.text_file) prompts.push_back({.text = read_file("--prompt-file", *flags.text_file)});
  if (flags.lines_file) append_lines(*flags.lines_file, prompts);
  for (const std::vector<int32_t>& tokens : flags.tokens) prompts.push_back({.tokens = tokens});
  if (flags.random) {
    parse_prompt_sizes(*flags.random);  // reports errors before a model is loaded
  } else if (prompts.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "no prompt: give --prompt, --prompt-file, --prompts, --tokens or --random-prompts");
  }
  return prompts;
}

// The C++ standard defines the generator's output.
void append_random_prompts(const PromptFlags& flags, const Engine& engine, uint64_t seed,
                           std::vector<Prompt>& prompts) {
  if (!flags.random) return;
  const PromptSizes sizes = parse_prompt_sizes(*flags.random);
  if (sizes.tokens > engine.max_context()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--random-prompts is '{}', but the context has {} tokens",
                            *flags.random, engine.max_context()));
  }
  std::mt19937_64 random(seed);
  for (int32_t i = 0; i < sizes.prompts; ++i) {
    Prompt& prompt = prompts.emplace_back();
    for (int32_t t = 0; t < sizes.tokens; ++t) {
      prompt.tokens.push_back(
          static_cast<int32_t>(random() % static_cast<uint64_t>(engine.vocabulary())));
    }
  }
}

}  // namespace fovea::cli
