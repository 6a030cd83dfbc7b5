// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/normalizer.h"

#include <utility>

#include "core/check.h"
#include "tokenizer/byte_letters.h"
#include "tokenizer/unicode.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

// Bounds the growth of texts by Replace and Charsmap.
constexpr size_t kMaxBytes = 512 << 20;

// Calls `visit(point, character)` for every character.
template <typename Visit>
void for_each_character(std::string_view text, const Visit& visit) {
  while (!text.empty()) {
    const std::string_view character = text.substr(0, next_utf8(text).bytes);
    text.remove_prefix(character.size());
    visit(code_point(character), character);
  }
}

// Drops all characters for which `dropped(point)` is true.
template <typename Dropped>
void drop(NormalizedText& text, const Dropped& dropped) {
  std::string kept;
  kept.reserve(text.text.size());
  bool first = true;
  for_each_character(text.text, [&](uint32_t point, std::string_view character) {
    if (!dropped(point)) {
      kept += character;
    } else if (first) {
      text.at_start = false;
    }
    first = false;
  });
  text.text = std::move(kept);
}

// Characters that the normalizer of Google's neural machine translation drops.
bool nmt_drops(uint32_t c) {
  return (c >= 0x01 && c <= 0x08) || c == 0x0B || (c >= 0x0E && c <= 0x1F) || c == 0x7F ||
         c == 0x8F || c == 0x9F;
}
bool nmt_space(uint32_t c) {
  return c == 0x09 || c == 0x0A || c == 0x0C || c == 0x0D || c == 0x1680 ||
         (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 || c == 0x2581 || c == 0xFEFF ||
         c == 0xFFFD;
}

void apply_step(const PrependStep& step, NormalizedText& text) {
  if (text.text.empty() || (step.only_at_start && !text.at_start)) return;
  text.text.insert(0, step.prefix);
}

void apply_step(const ReplaceStep& step, NormalizedText& text) {
  const MatchText subject(step.pattern, text.text);
  PatternScratch scratch;
  std::string out;
  size_t done = 0;
  while (const auto match = subject.find(done, scratch)) {
    const std::string_view matched =
        std::string_view(text.text).substr(match->begin, match->end - match->begin);
    // The replacement of several characters takes the position of the last one.
    const bool several = next_utf8(matched).bytes < matched.size();
    if (match->begin == 0 && (several || step.content.empty())) text.at_start = false;
    out.append(text.text, done, match->begin - done).append(step.content);
    done = match->end;
    if (out.size() > kMaxBytes) {
      fail(ErrorCode::unsupported, "the normalizer produces more than {} bytes from the text",
           kMaxBytes);
    }
  }
  if (done == 0) return;
  out.append(text.text, done);
  text.text = std::move(out);
}

void apply_step(const StripStep& step, NormalizedText& text) {
  size_t begin = 0;
  size_t end = 0;  // end of the last character that is not white space
  bool only_space = true;
  size_t at = 0;
  for_each_character(text.text, [&](uint32_t point, std::string_view character) {
    at += character.size();
    if (!is_white_space(point)) {
      only_space = false;
      end = at;
    } else if (only_space) {
      begin = at;
    }
  });
  if (step.left && begin > 0) text.at_start = false;
  if (step.right) text.text.resize(only_space ? 0 : end);
  if (step.left) text.text.erase(0, begin);
}

void apply_step(const SingleSpacesStep&, NormalizedText& text) {
  std::string out;
  for (const char c : text.text) {
    if (c == ' ' && (out.empty() || out.back() == ' ')) continue;
    out += c;
  }
  constexpr std::string_view kMark = "\u2581";  // later replaces spaces
  while (out.ends_with(' ') || out.ends_with(kMark)) {
    out.resize(out.size() - (out.ends_with(' ') ? 1 : kMark.size()));
  }
  text.text = std::move(out);
}

void apply_step(const LowercaseStep&, NormalizedText& text) { text.text = to_lower(text.text); }

void apply_step(const StripAccentsStep&, NormalizedText& text) { drop(text, is_combining_mark); }

void apply_step(const NmtStep&, NormalizedText& text) {
  drop(text, nmt_drops);
  std::string out;
  for_each_character(text.text, [&](uint32_t point, std::string_view character) {
    out += nmt_space(point) ? std::string_view(" ") : character;
  });
  text.text = std::move(out);
}

void apply_step(const ByteLettersStep&, NormalizedText& text) {
  text.text = to_byte_letters(text.text);
}

void apply_step(UnicodeForm form, NormalizedText& text) { text.text = to_form(form, text.text); }

void apply_step(const Charsmap& map, NormalizedText& text) { text.text = map.apply(text.text); }

}  // namespace

NormalizedText Normalizer::apply(std::string_view text, bool at_start) const {
  NormalizedText result{std::string(text), at_start};
  for (const NormalizerStep& step : steps_) {
    std::visit([&](const auto& known) { apply_step(known, result); }, step);
  }
  return result;
}

}  // namespace fovea
