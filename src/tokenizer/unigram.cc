// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/unigram.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/check.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

// Distance between an unknown character's score and the lowest score of a token.
constexpr double kUnkPenalty = 10;

ByteTrie trie_of(const Vocabulary& vocabulary) {
  std::vector<ByteTrie::Key> keys;
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    if (!vocabulary.text(id).empty()) keys.push_back({vocabulary.text(id), id});
  }
  return ByteTrie(std::move(keys));
}

}  // namespace

UnigramModel::UnigramModel(Vocabulary vocabulary, std::vector<double> scores,
                           std::optional<int32_t> unk, bool byte_fallback)
    : vocabulary_(std::move(vocabulary)),
      scores_(std::move(scores)),
      unk_(unk),
      byte_fallback_(byte_fallback),
      bytes_(vocabulary_),
      trie_(trie_of(vocabulary_)) {
  double worst = std::numeric_limits<double>::infinity();
  for (const double score : scores_) {
    if (std::isfinite(score)) worst = std::min(worst, score);
  }
  unk_score_ = worst - kUnkPenalty;
}

std::vector<UnigramModel::Step> UnigramModel::best_steps(std::string_view word) const {
  std::vector<Step> steps(word.size() + 1);
  const auto offer = [&](size_t begin, size_t end, int32_t token, double score) {
    const double sum = steps[begin].score + score;
    if (steps[end].bytes != 0 && sum <= steps[end].score) return;
    steps[end] = {sum, token, static_cast<int32_t>(end - begin)};
  };
  for (size_t begin = 0; begin < word.size();) {
    const size_t character = next_utf8(word.substr(begin)).bytes;
    bool known = false;  // the character alone is a token
    int32_t node = ByteTrie::kRoot;
    for (size_t at = begin; at < word.size(); ++at) {
      node = trie_.child(node, word[at]);
      if (node == ByteTrie::kNone) break;
      const int32_t token = trie_.value(node);
      if (token == ByteTrie::kNone) continue;
      offer(begin, at + 1, token, scores_[token]);
      known = known || at + 1 - begin == character;
    }
    if (!known) offer(begin, begin + character, unk_.value_or(Vocabulary::kNone), unk_score_);
    begin += character;
  }
  return steps;
}

void UnigramModel::append_unknown(std::string_view text, std::vector<int32_t>& tokens) const {
  const int32_t known = vocabulary_.find(text);
  if (known != Vocabulary::kNone) return tokens.push_back(known);
  if (byte_fallback_ && bytes_.append(text, tokens)) return;
  if (!unk_) {
    fail(ErrorCode::unsupported,
         "the text has a character that the vocabulary lacks, and there is no unk_id");
  }
  tokens.push_back(*unk_);
}

void UnigramModel::encode(std::string_view word, std::vector<int32_t>& tokens) const {
  if (word.empty()) return;
  const std::vector<Step> steps = best_steps(word);
  std::vector<std::pair<size_t, size_t>> pieces;  // from last to first
  std::vector<bool> unknown;                      // per piece
  for (size_t end = word.size(); end > 0;) {
    const Step& step = steps[end];
    const size_t begin = end - static_cast<size_t>(step.bytes);
    const bool is_unknown = step.token == unk_.value_or(Vocabulary::kNone);
    if (is_unknown && !unknown.empty() && unknown.back()) {
      pieces.back().first = begin;  // a run of unknown characters is one piece
    } else {
      pieces.emplace_back(begin, end);
      unknown.push_back(is_unknown);
    }
    end = begin;
  }
  for (size_t i = pieces.size(); i-- > 0;) {
    const auto [begin, end] = pieces[i];
    if (unknown[i]) {
      append_unknown(word.substr(begin, end - begin), tokens);
    } else {
      tokens.push_back(steps[end].token);
    }
  }
}

}  // namespace fovea
