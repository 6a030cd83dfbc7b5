// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/pre_tokenizer.h"

#include "tokenizer/byte_letters.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

struct Piece {
  std::string_view text;
  bool at_start = false;  // at the start of the whole text

  Piece part(size_t begin, size_t end) const {
    return {text.substr(begin, end - begin), at_start && begin == 0};
  }
};

// Joins matches and the texts between them, which arrive in order, according to the behavior.
template <typename Emit>
class PartJoiner {
 public:
  PartJoiner(SplitBehavior behavior, const Emit& emit) : behavior_(behavior), emit_(emit) {}

  void push(size_t begin, size_t end, bool is_match) {
    if (begin == end) return;
    if (behavior_ == SplitBehavior::removed && is_match) return;
    if (joins_last(is_match) && last_end_ > last_begin_) {
      last_end_ = end;
    } else {
      finish();
      last_begin_ = begin;
      last_end_ = end;
    }
    last_is_match_ = is_match;
  }

  void finish() {
    if (last_end_ > last_begin_) emit_(last_begin_, last_end_);
    last_begin_ = last_end_;
  }

 private:
  bool joins_last(bool is_match) const {
    switch (behavior_) {
      case SplitBehavior::removed:
      case SplitBehavior::isolated:
        return false;
      case SplitBehavior::contiguous:
        return is_match == last_is_match_;
      case SplitBehavior::merged_with_previous:
        return is_match && !last_is_match_;
      case SplitBehavior::merged_with_next:
        return !is_match && last_is_match_;
    }
    return false;
  }

  SplitBehavior behavior_;
  const Emit& emit_;
  size_t last_begin_ = 0, last_end_ = 0;  // the part that may still grow
  bool last_is_match_ = false;
};

class Splitter {
 public:
  Splitter(const std::vector<PreTokenizerStep>& steps,
           const std::function<void(std::string_view)>& word)
      : steps_(steps), word_(word) {}

  // Applies the steps from `index` on.
  void run(size_t index, Piece piece) {
    if (piece.text.empty()) return;
    if (index == steps_.size()) return word_(piece.text);
    std::visit([&](const auto& step) { apply(step, index, piece); }, steps_[index]);
  }

 private:
  void split(const Pattern& pattern, SplitBehavior behavior, bool invert, const Piece& piece,
             const auto& emit) {
    const MatchText subject(pattern, piece.text);
    PartJoiner joiner(behavior, emit);
    size_t done = 0;
    while (const auto match = subject.find(done, scratch_)) {
      joiner.push(done, match->begin, invert);
      joiner.push(match->begin, match->end, !invert);
      done = match->end;
    }
    joiner.push(done, piece.text.size(), invert);
    joiner.finish();
  }

  void apply(const SplitStep& step, size_t index, const Piece& piece) {
    split(step.pattern, step.behavior, step.invert, piece,
          [&](size_t begin, size_t end) { run(index + 1, piece.part(begin, end)); });
  }

  void apply(const ByteLevelStep& step, size_t index, Piece piece) {
    std::string prefixed;
    if (step.prefix_space && !piece.text.starts_with(' ')) {
      prefixed.append(" ").append(piece.text);
      piece.text = prefixed;
    }
    const auto emit = [&](size_t begin, size_t end) {
      const Piece part = piece.part(begin, end);
      run(index + 1, {to_byte_letters(part.text), part.at_start});
    };
    if (!step.pattern) return emit(0, piece.text.size());
    split(*step.pattern, SplitBehavior::isolated, false, piece, emit);
  }

  void apply(const MetaspaceStep& step, size_t index, const Piece& piece) {
    std::string text;
    for (const char c : piece.text) {
      if (c == ' ') {
        text += step.replacement;
      } else {
        text += c;
      }
    }
    const bool wanted = step.scheme == PrependScheme::always ||
                        (step.scheme == PrependScheme::first && piece.at_start);
    if (wanted && !text.starts_with(step.replacement)) text.insert(0, step.replacement);
    const Piece whole = {text, piece.at_start};
    if (!step.split) return run(index + 1, whole);
    const auto emit = [&](size_t begin, size_t end) { run(index + 1, whole.part(begin, end)); };
    PartJoiner joiner(SplitBehavior::merged_with_next, emit);
    size_t done = 0;
    for (size_t at = 0; (at = text.find(step.replacement, at)) != text.npos;) {
      joiner.push(done, at, false);
      joiner.push(at, at + step.replacement.size(), true);
      done = at += step.replacement.size();
    }
    joiner.push(done, text.size(), false);
    joiner.finish();
  }

  void apply(const FixedLengthStep& step, size_t index, const Piece& piece) {
    size_t begin = 0, characters = 0;
    for (size_t at = 0; at < piece.text.size();) {
      at += next_utf8(piece.text.substr(at)).bytes;
      if (++characters % step.length != 0 && at < piece.text.size()) continue;
      run(index + 1, piece.part(begin, at));
      begin = at;
    }
  }

  const std::vector<PreTokenizerStep>& steps_;
  const std::function<void(std::string_view)>& word_;
  PatternScratch scratch_;
};

}  // namespace

void PreTokenizer::split(const NormalizedText& text,
                         const std::function<void(std::string_view)>& word) const {
  Splitter(steps_, word).run(0, {text.text, text.at_start});
}

}  // namespace fovea
