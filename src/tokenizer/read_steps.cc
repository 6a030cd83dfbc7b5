// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/read_steps.h"

#include <string>
#include <utility>

#include "core/check.h"
#include "core/quote.h"
#include "tokenizer/pattern_translator.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

constexpr size_t kMaxSteps = 64;
constexpr int64_t kMaxLength = 1 << 20;

// The pattern of GPT-2, which is built into ByteLevel.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Punctuation in the reference's Unicode version, which is older than that of PCRE2.
constexpr std::string_view kPunctuation =
    "[!-/:-@\\[-`{-~\\x{166D}\\x{111C9}]|"
    "(?!["
    "\\x{61D}\\x{9FD}\\x{A76}\\x{C77}\\x{C84}\\x{1B7D}-\\x{1B7E}\\x{2E43}-\\x{2E4F}"
    "\\x{2E52}-\\x{2E5D}\\x{10EAD}\\x{10F55}-\\x{10F59}\\x{10F86}-\\x{10F89}\\x{1144B}-"
    "\\x{1144F}\\x{1145A}-\\x{1145B}\\x{1145D}\\x{11660}-\\x{1166C}\\x{116B9}\\x{1183B}"
    "\\x{11944}-\\x{11946}\\x{119E2}\\x{11A3F}-\\x{11A46}\\x{11A9A}-\\x{11A9C}\\x{11A9E}-"
    "\\x{11AA2}\\x{11B00}-\\x{11B09}\\x{11C41}-\\x{11C45}\\x{11C70}-\\x{11C71}\\x{11EF7}-"
    "\\x{11EF8}\\x{11F43}-\\x{11F4F}\\x{11FFF}\\x{12FF1}-\\x{12FF2}\\x{16E97}-\\x{16E9A}"
    "\\x{16FE2}\\x{1E95E}-\\x{1E95F}"
    "])\\p{P}";

[[noreturn]] void refuse(std::string_view name, std::string_view what) {
  fail(ErrorCode::unsupported, "{}: {} is not supported", name, what);
}

// Calls `read(step)` for every step in nested sequences.
template <typename Read>
void for_each_step(const JsonObject& item, const char* list, const char* what,
                   std::string_view name, const Read& read) {
  if (item.text("type") != "Sequence") return read(item);
  const std::vector<JsonObject> steps = item.objects(list);
  if (steps.size() > kMaxSteps) {
    fail(ErrorCode::corrupt_file, "{}: {} has {} steps, at most {}", name, what, steps.size(),
         kMaxSteps);
  }
  for (const JsonObject& step : steps) for_each_step(step, list, what, name, read);
}

void check_steps(size_t steps, const char* what, std::string_view name) {
  if (steps < kMaxSteps) return;
  fail(ErrorCode::corrupt_file, "{}: {} has more than {} steps", name, what, kMaxSteps);
}

Pattern read_pattern(const JsonObject& item, std::string_view name) {
  const JsonObject pattern = item.object("pattern");
  return pattern.has("Regex") ? Pattern::from_regex(pattern.text("Regex"), name)
                              : Pattern::from_literal(pattern.text("String"), name);
}

// Reads a field that contains one character.
std::string read_character(const JsonObject& item, const char* field, std::string_view fallback) {
  const std::string text = item.text_or(field, fallback);
  if (text.empty() || next_utf8(text).bytes != text.size()) item.refuse(field, "one character");
  return text;
}

SplitBehavior read_behavior(const JsonObject& item, std::string_view fallback,
                            std::string_view name) {
  const std::string behavior = item.text_or("behavior", fallback);
  if (behavior == "Removed") return SplitBehavior::removed;
  if (behavior == "Isolated") return SplitBehavior::isolated;
  if (behavior == "Contiguous") return SplitBehavior::contiguous;
  if (behavior == "MergedWithPrevious") return SplitBehavior::merged_with_previous;
  if (behavior == "MergedWithNext") return SplitBehavior::merged_with_next;
  refuse(name, "the behavior " + quote(behavior) + " of the pre_tokenizer " + item.text("type"));
}

PrependScheme read_prepend_scheme(const JsonObject& item, std::string_view name) {
  const std::string scheme = item.text_or("prepend_scheme", "always");
  if (!item.boolean_or("add_prefix_space", true)) {
    if (item.has("prepend_scheme") && scheme != "never") {
      fail(ErrorCode::corrupt_file,
           "{}: Metaspace has add_prefix_space false and the prepend_scheme {}", name,
           quote(scheme));
    }
    return PrependScheme::never;
  }
  if (scheme == "always") return PrependScheme::always;
  if (scheme == "never") return PrependScheme::never;
  if (scheme == "first") return PrependScheme::first;
  refuse(name, "the prepend_scheme " + quote(scheme));
}

NormalizerStep normalizer_step(const JsonObject& item, std::string_view name) {
  const std::string type = item.text("type");
  if (type == "NFC") return UnicodeForm::nfc;
  if (type == "NFD") return UnicodeForm::nfd;
  if (type == "NFKC") return UnicodeForm::nfkc;
  if (type == "NFKD") return UnicodeForm::nfkd;
  if (type == "Prepend") return PrependStep{item.text("prepend")};
  if (type == "Replace") return ReplaceStep{read_pattern(item, name), item.text("content")};
  if (type == "Strip") {
    return StripStep{item.boolean_or("strip_left", false), item.boolean_or("strip_right", false)};
  }
  if (type == "Lowercase") return LowercaseStep();
  if (type == "StripAccents") return StripAccentsStep();
  if (type == "Nmt") return NmtStep();
  if (type == "ByteLevel") return ByteLettersStep();
  if (type == "Precompiled") {
    return Charsmap(decode_base64(item.text("precompiled_charsmap"), name), name);
  }
  refuse(name, "normalizer " + quote(type));
}

PreTokenizerStep pre_tokenizer_step(const JsonObject& item, std::string_view name) {
  const std::string type = item.text("type");
  const auto split = [](std::string_view pcre, SplitBehavior behavior, bool invert = false) {
    return SplitStep{Pattern::from_pcre(pcre), behavior, invert};
  };
  if (type == "ByteLevel") {
    ByteLevelStep step;
    step.prefix_space = item.boolean_or("add_prefix_space", true);
    if (item.boolean_or("use_regex", true)) step.pattern = Pattern::from_regex(kGpt2Pattern, name);
    return step;
  }
  if (type == "Metaspace") {
    return MetaspaceStep{read_character(item, "replacement", "\u2581"),
                         read_prepend_scheme(item, name), item.boolean_or("split", true)};
  }
  if (type == "Split") {
    return SplitStep{read_pattern(item, name), read_behavior(item, "", name),
                     item.boolean_or("invert", false)};
  }
  if (type == "Digits") {
    return split(item.boolean_or("individual_digits", false) ? "\\p{N}" : "\\p{N}+",
                 SplitBehavior::isolated);
  }
  if (type == "Punctuation") {
    return SplitStep{Pattern::from_pcre(kPunctuation, true), read_behavior(item, "Isolated", name)};
  }
  if (type == "Whitespace") {
    const std::string word = std::string(kWordClass) + "\\x{200C}\\x{200D}";
    return split("[" + word + "]+|[^" + word + std::string(kWhiteSpaceClass) + "]+",
                 SplitBehavior::removed, true);
  }
  if (type == "WhitespaceSplit") {
    return split("[" + std::string(kWhiteSpaceClass) + "]", SplitBehavior::removed);
  }
  if (type == "CharDelimiterSplit") {
    return SplitStep{Pattern::from_literal(read_character(item, "delimiter", ""), name),
                     SplitBehavior::removed};
  }
  if (type == "FixedLength") {
    return FixedLengthStep{static_cast<size_t>(item.integer_or("length", 5, 1, kMaxLength))};
  }
  refuse(name, "pre_tokenizer " + quote(type));
}

DecoderStep decoder_step(const JsonObject& item, std::string_view name) {
  const std::string type = item.text("type");
  if (type == "ByteLevel") return ByteLevelDecoder();
  if (type == "ByteFallback") return ByteFallbackDecoder();
  if (type == "Fuse") return FuseDecoder();
  if (type == "Replace") return ReplaceDecoder{read_pattern(item, name), item.text("content")};
  if (type == "Metaspace") {
    return MetaspaceDecoder{read_character(item, "replacement", "\u2581"),
                            read_prepend_scheme(item, name) != PrependScheme::never};
  }
  if (type == "Strip") {
    const auto count = [&](const char* field) {
      return static_cast<size_t>(item.integer(field, 0, kMaxLength));
    };
    return StripDecoder{read_character(item, "content", ""), count("start"), count("stop")};
  }
  refuse(name, "decoder " + quote(type));
}

}  // namespace

Normalizer read_normalizer(const JsonObject& item, std::string_view name) {
  Normalizer normalizer;
  for_each_step(item, "normalizers", "normalizer", name, [&](const JsonObject& step) {
    check_steps(normalizer.steps(), "normalizer", name);
    normalizer.add(normalizer_step(step, name));
  });
  return normalizer;
}

PreTokenizer read_pre_tokenizer(const JsonObject& item, std::string_view name) {
  PreTokenizer pre_tokenizer;
  for_each_step(item, "pretokenizers", "pre_tokenizer", name, [&](const JsonObject& step) {
    check_steps(pre_tokenizer.steps(), "pre_tokenizer", name);
    pre_tokenizer.add(pre_tokenizer_step(step, name));
  });
  return pre_tokenizer;
}

Decoder read_decoder(const std::optional<JsonObject>& item, std::string_view name) {
  Decoder decoder;
  if (!item) {
    decoder.add(JoinDecoder());
    return decoder;
  }
  for_each_step(*item, "decoders", "decoder", name, [&](const JsonObject& step) {
    check_steps(decoder.steps(), "decoder", name);
    if (const auto problem = decoder.add(decoder_step(step, name))) refuse(name, *problem);
  });
  return decoder;
}

}  // namespace fovea
