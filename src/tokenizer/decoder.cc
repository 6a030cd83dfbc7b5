// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/decoder.h"

#include <algorithm>
#include <utility>

#include "tokenizer/byte_letters.h"
#include "tokenizer/byte_tokens.h"

namespace fovea {
namespace {

template <typename T>
bool is(const DecoderStep& step) {
  return std::holds_alternative<T>(step);
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t done = 0;
  for (size_t at = 0; (at = text.find(from, done)) != text.npos; done = at + from.size()) {
    out.append(text.substr(done, at - done)).append(to);
  }
  return out.append(text.substr(done));
}

std::string replaced(const Pattern& pattern, std::string_view content, std::string_view text) {
  if (pattern.is_literal()) return replace_all(text, pattern.literal(), content);
  const MatchText subject(pattern, text);
  PatternScratch scratch;
  std::string out;
  size_t done = 0;
  while (const auto match = subject.find(done, scratch)) {
    out.append(text.substr(done, match->begin - done)).append(content);
    done = match->end;
  }
  return out.append(text.substr(done));
}

std::string stripped(const StripDecoder& step, std::string_view token) {
  for (size_t i = 0; i < step.start && token.starts_with(step.content); ++i) {
    token.remove_prefix(step.content.size());
  }
  for (size_t i = 0; i < step.stop && token.ends_with(step.content); ++i) {
    token.remove_suffix(step.content.size());
  }
  return std::string(token);
}

}  // namespace

std::optional<std::string> Decoder::add(DecoderStep step) {
  if (ends_fused_) {
    const auto* replace = std::get_if<ReplaceDecoder>(&step);
    if (replace != nullptr && !replace->pattern.is_literal()) return "a pattern behind Fuse";
    if (is<ByteFallbackDecoder>(step)) return "ByteFallback behind Fuse";
    if (is<ByteLevelDecoder>(step)) return "ByteLevel behind Fuse";
  }
  fused_.push_back(ends_fused_);
  ends_fused_ = ends_fused_ || is<FuseDecoder>(step) || is<ByteLevelDecoder>(step);
  steps_.push_back(std::move(step));
  return std::nullopt;
}

std::string Decoder::token_bytes(std::string_view token) const {
  std::string bytes(token);
  for (const DecoderStep& any : steps_) {
    if (const auto* replace = std::get_if<ReplaceDecoder>(&any)) {
      bytes = replaced(replace->pattern, replace->content, bytes);
    } else if (const auto* metaspace = std::get_if<MetaspaceDecoder>(&any)) {
      bytes = replace_all(bytes, metaspace->replacement, " ");
    } else if (is<ByteFallbackDecoder>(any)) {
      if (const auto byte = byte_of_token(bytes)) return std::string(1, *byte);
    } else if (is<ByteLevelDecoder>(any)) {
      std::string letters = std::exchange(bytes, {});
      append_letter_bytes(letters, bytes);
    }
  }
  return bytes;
}

std::string DecoderStream::push(std::string_view token) {
  std::string out;
  pass(0, std::string(token), out);
  return out;
}

std::string DecoderStream::finish() {
  std::string out;
  for (size_t index = 0; index < states_.size(); ++index) flush(index, out);
  states_.assign(states_.size(), State());
  return out;
}

// Passes a token, or after Fuse a piece of one, through the steps from `index` on.
void DecoderStream::pass(size_t index, std::string token, std::string& out) {
  if (index == states_.size()) {
    out += token;
    return;
  }
  State& state = states_[index];
  const DecoderStep& any = decoder_->steps_[index];
  const bool fused = decoder_->fused_[index];
  if (const auto* replace = std::get_if<ReplaceDecoder>(&any)) {
    token = fused ? replace_piece(*replace, state, token)
                  : replaced(replace->pattern, replace->content, token);
  } else if (const auto* metaspace = std::get_if<MetaspaceDecoder>(&any)) {
    const bool first = fused || !std::exchange(state.started, true);
    token = replace_all(token, metaspace->replacement, first && metaspace->drop_first ? "" : " ");
  } else if (const auto* strip = std::get_if<StripDecoder>(&any)) {
    token = fused ? strip_piece(*strip, state, token) : stripped(*strip, token);
  } else if (is<ByteFallbackDecoder>(any)) {
    if (const auto byte = byte_of_token(token)) {
      state.held += *byte;
      return;
    }
    flush_bytes(index, out);
  } else if (is<ByteLevelDecoder>(any)) {
    std::string bytes;
    append_letter_bytes(token, bytes);
    token = state.characters.push(bytes);
  } else if (is<JoinDecoder>(any)) {
    if (std::exchange(state.started, true)) token.insert(0, " ");
  }
  pass(index + 1, std::move(token), out);
}

// Ends the text: passes on what the step withholds.
void DecoderStream::flush(size_t index, std::string& out) {
  State& state = states_[index];
  const DecoderStep& any = decoder_->steps_[index];
  if (is<ByteFallbackDecoder>(any)) return flush_bytes(index, out);
  std::string rest = state.characters.finish();
  if (is<ReplaceDecoder>(any)) rest += std::exchange(state.held, {});
  if (!rest.empty()) pass(index + 1, std::move(rest), out);
}

// Turns each byte that is no text into one U+FFFD.
void DecoderStream::flush_bytes(size_t index, std::string& out) {
  const std::string bytes = std::exchange(states_[index].held, {});
  if (bytes.empty()) return;
  if (replace_broken_utf8(bytes) == bytes) return pass(index + 1, bytes, out);
  for (size_t i = 0; i < bytes.size(); ++i) {
    pass(index + 1, std::string(kReplacementCharacter), out);
  }
}

// Strips a text that arrives in pieces. Withholds characters that may be removed at its end.
std::string DecoderStream::strip_piece(const StripDecoder& step, State& state,
                                       std::string_view piece) const {
  while (!state.started && state.cut < step.start && piece.starts_with(step.content)) {
    piece.remove_prefix(step.content.size());
    ++state.cut;
  }
  if (!piece.empty()) state.started = true;
  std::string text = std::exchange(state.held, {}).append(piece);
  size_t end = text.size();
  for (size_t i = 0; i < step.stop && std::string_view(text).substr(0, end).ends_with(step.content);
       ++i) {
    end -= step.content.size();
  }
  state.held = text.substr(end);
  text.resize(end);
  return text;
}

// Replaces in a text that arrives in pieces. Withholds the possible beginning of a match.
std::string DecoderStream::replace_piece(const ReplaceDecoder& step, State& state,
                                         std::string_view piece) const {
  const std::string text = std::exchange(state.held, {}).append(piece);
  PatternScratch scratch;
  std::string out;
  size_t done = 0;
  while (const auto match = step.pattern.find(text, done, scratch)) {
    out.append(text, done, match->begin - done).append(step.content);
    done = match->end;
  }
  const std::string_view rest = std::string_view(text).substr(done);
  const std::string_view wanted = step.pattern.literal();
  size_t keep = std::min(rest.size(), wanted.size() - 1);
  while (keep > 0 && !wanted.starts_with(rest.substr(rest.size() - keep))) --keep;
  state.held = rest.substr(rest.size() - keep);
  return out.append(rest.substr(0, rest.size() - keep));
}

}  // namespace fovea
