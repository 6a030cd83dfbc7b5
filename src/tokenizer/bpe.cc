// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/bpe.h"

#include <queue>

namespace fovea {
namespace {

constexpr int32_t kNone = -1;

struct Symbol {
  int32_t token = kNone;  // kNone: merged into its left neighbour
  int32_t previous = kNone;
  int32_t next = kNone;
};

// A merge of the symbol at `position` with its right neighbour, as it was when this was queued.
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

}  // namespace

void BytePairMerger::add_merge(int32_t left, int32_t right, int32_t rank, int32_t merged) {
  merges_.insert_or_assign(pair_key(left, right), Merge{rank, merged});
}

const BytePairMerger::Merge* BytePairMerger::find(int32_t left, int32_t right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

void BytePairMerger::encode(std::string_view word, std::vector<int32_t>& tokens) const {
  const auto length = static_cast<int32_t>(word.size());
  std::vector<Symbol> symbols(word.size());
  for (int32_t i = 0; i < length; ++i) {
    symbols[i] = {byte_tokens_[static_cast<uint8_t>(word[i])], i - 1,
                  i + 1 < length ? i + 1 : kNone};
  }
  std::vector<Candidate> candidates;
  for (int32_t i = 0; i + 1 < length; ++i) {
    const Merge* merge = find(symbols[i].token, symbols[i + 1].token);
    if (merge != nullptr) candidates.push_back({merge->rank, i, merge->merged});
  }
  std::priority_queue queue(std::greater<Candidate>{}, std::move(candidates));

  const auto enqueue = [&](int32_t position) {
    if (position == kNone || symbols[position].next == kNone) return;
    const Merge* merge = find(symbols[position].token, symbols[symbols[position].next].token);
    if (merge != nullptr) queue.push({merge->rank, position, merge->merged});
  };
  while (!queue.empty()) {
    const Candidate candidate = queue.top();
    queue.pop();
    Symbol& left = symbols[candidate.position];
    if (left.token == kNone || left.next == kNone) continue;
    Symbol& right = symbols[left.next];
    const Merge* merge = find(left.token, right.token);
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
