// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/bpe.h"

#include <bit>
#include <queue>
#include <utility>

#include "core/check.h"
#include "core/quote.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

constexpr int32_t kNone = -1;
constexpr uint32_t kCommon = 0x180;  // ASCII, Latin-1 and the alphabet of byte-level models

struct Symbol {
  int32_t token = kNone;  // kNone if merged into the left neighbour
  int32_t previous = kNone;
  int32_t next = kNone;
};

// A merge of the symbol at `position` with its right neighbour, in the state when it was queued.
struct Candidate {
  int32_t rank = 0;
  int32_t position = 0;
  int32_t merged = 0;

  bool operator>(const Candidate& other) const {
    return rank != other.rank ? rank > other.rank : position > other.position;
  }
};

constexpr uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
}

std::vector<Symbol> linked(const std::vector<int32_t>& tokens) {
  const auto length = static_cast<int32_t>(tokens.size());
  std::vector<Symbol> symbols(tokens.size());
  for (int32_t i = 0; i < length; ++i) {
    symbols[i] = {tokens[i], i - 1, i + 1 < length ? i + 1 : kNone};
  }
  return symbols;
}

}  // namespace

MergeTable::MergeTable(size_t merges) : slots_(std::bit_ceil(merges * 2 + 1)) {}

size_t MergeTable::slot_of(uint64_t pair) const {
  const size_t mask = slots_.size() - 1;
  // The finalizer of SplitMix64 spreads pairs of neighbouring ids.
  uint64_t hash = (pair ^ pair >> 30) * 0xBF58476D1CE4E5B9u;
  hash = (hash ^ hash >> 27) * 0x94D049BB133111EBu;
  size_t slot = (hash ^ hash >> 31) & mask;
  while (slots_[slot].pair != ~uint64_t{0} && slots_[slot].pair != pair) slot = (slot + 1) & mask;
  return slot;
}

void MergeTable::add(int32_t left, int32_t right, Merge merge) {
  const uint64_t pair = pair_key(left, right);
  slots_[slot_of(pair)] = {pair, merge};
}

const Merge* MergeTable::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_key(left, right);
  const Slot& slot = slots_[slot_of(pair)];
  return slot.pair == pair ? &slot.merge : nullptr;
}

BpeModel::BpeModel(Vocabulary vocabulary, MergeTable merges, BpeOptions options)
    : vocabulary_(std::move(vocabulary)),
      merges_(std::move(merges)),
      options_(std::move(options)),
      bytes_(vocabulary_) {
  if (options_.unk_token) unk_ = vocabulary_.find(*options_.unk_token);
  for (uint32_t point = 0; point < kCommon; ++point) {
    std::string character;
    append_utf8(point, character);
    common_.push_back(vocabulary_.find(character));
  }
}

int32_t BpeModel::unk() const {
  if (unk_ == kNone) {
    fail(ErrorCode::unsupported,
         "the text has a character that the vocabulary lacks, and the unk_token {} is no token",
         quote(*options_.unk_token));
  }
  return unk_;
}

int32_t BpeModel::character_token(std::string_view character) const {
  const uint32_t point = code_point(character);
  return point < kCommon ? common_[point] : vocabulary_.find(character);
}

std::vector<int32_t> BpeModel::character_tokens(std::string_view word) const {
  std::vector<int32_t> tokens;
  tokens.reserve(word.size());
  bool unknown = false;  // an unk_token is pending
  while (!word.empty()) {
    const std::string_view character = word.substr(0, next_utf8(word).bytes);
    word.remove_prefix(character.size());
    const int32_t token = character_token(character);
    if (token != kNone) {
      if (std::exchange(unknown, false)) tokens.push_back(unk());
      tokens.push_back(token);
      continue;
    }
    // Like the reference, puts bytes before a pending unk_token.
    if (options_.byte_fallback && bytes_.append(character, tokens)) continue;
    if (!options_.unk_token) continue;
    if (unknown && !options_.fuse_unk) tokens.push_back(unk());
    unknown = true;
  }
  if (unknown) tokens.push_back(unk());
  return tokens;
}

void BpeModel::encode(std::string_view word, std::vector<int32_t>& tokens) const {
  if (options_.ignore_merges) {
    const int32_t token = vocabulary_.find(word);
    if (token != kNone) return tokens.push_back(token);
  }
  std::vector<Symbol> symbols = linked(character_tokens(word));
  std::vector<Candidate> candidates;
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    const Merge* merge = merges_.find(symbols[i].token, symbols[i + 1].token);
    if (merge == nullptr) continue;
    candidates.push_back({merge->rank, static_cast<int32_t>(i), merge->merged});
  }
  std::priority_queue queue(std::greater<Candidate>{}, std::move(candidates));

  const auto enqueue = [&](int32_t position) {
    if (position == kNone || symbols[position].next == kNone) return;
    const Merge* merge =
        merges_.find(symbols[position].token, symbols[symbols[position].next].token);
    if (merge != nullptr) queue.push({merge->rank, position, merge->merged});
  };
  while (!queue.empty()) {
    const Candidate candidate = queue.top();
    queue.pop();
    Symbol& left = symbols[candidate.position];
    if (left.token == kNone || left.next == kNone) continue;
    Symbol& right = symbols[left.next];
    const Merge* merge = merges_.find(left.token, right.token);
    if (merge == nullptr || merge->merged != candidate.merged) continue;  // outdated
    left.token = candidate.merged;
    left.next = right.next;
    right.token = kNone;
    if (left.next != kNone) symbols[left.next].previous = candidate.position;
    enqueue(left.previous);
    enqueue(candidate.position);
  }
  for (const Symbol& symbol : symbols) {
    if (symbol.token != kNone) tokens.push_back(symbol.token);
  }
}

}  // namespace fovea
