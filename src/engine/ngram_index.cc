// SPDX-License-Identifier: Apache-2.0
#include "engine/ngram_index.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <unordered_map>

#include "engine/drafter.h"

namespace fovea {
namespace {

constexpr size_t kMinMatch = 2;       // the tokens that are hashed
constexpr size_t kMaxMatch = 16;      // longer matches are not better
constexpr int kMaxPlaces = 32;        // bounds the search in repetitive texts
constexpr size_t kMinEntries = 1024;  // first size of the hash table

size_t hash_of(int32_t before_last, int32_t last) {
  const uint64_t pair =
      uint64_t{static_cast<uint32_t>(before_last)} << 32 | uint64_t{static_cast<uint32_t>(last)};
  return static_cast<size_t>((pair * 0x9e3779b97f4a7c15u) >> 24);
}

}  // namespace

int32_t& NgramIndex::newest(int32_t before_last, int32_t last) {
  return newest_[hash_of(before_last, last) & (newest_.size() - 1)];
}

void NgramIndex::link(std::span<const int32_t> text, size_t place) {
  int32_t& head = newest(text[place - 2], text[place - 1]);
  previous_[place] = head;
  head = static_cast<int32_t>(place);
}

// Links all places that a token follows.
void NgramIndex::read(std::span<const int32_t> text) {
  if (text.size() > newest_.size()) {
    newest_.assign(std::max(kMinEntries, std::bit_ceil(2 * text.size())), 0);
    for (size_t place = kMinMatch; place < previous_.size(); ++place) link(text, place);
  }
  for (size_t place = previous_.size(); place < text.size(); ++place) {
    previous_.push_back(0);
    if (place >= kMinMatch) link(text, place);
  }
}

size_t NgramIndex::find(std::span<const int32_t> text) const {
  const size_t size = text.size();
  const size_t entry = hash_of(text[size - 2], text[size - 1]) & (newest_.size() - 1);
  size_t best = 0, longest = kMinMatch - 1;
  auto place = static_cast<size_t>(newest_[entry]);
  for (int i = 0; i < kMaxPlaces && place > 0; ++i) {
    size_t match = 0;
    while (match < std::min(kMaxMatch, place) && text[place - 1 - match] == text[size - 1 - match])
      ++match;
    if (match > longest) {
      longest = match;
      best = place;
    }
    place = static_cast<size_t>(previous_[place]);
  }
  return best;
}

void NgramIndex::guess(std::span<const int32_t> text, int32_t count, std::vector<int32_t>& drafts) {
  if (text.size() <= kMinMatch) return;
  read(text);
  const size_t place = find(text);
  if (place == 0) return;
  const size_t first = drafts.size();
  for (size_t i = 0; i < static_cast<size_t>(std::max(count, 0)); ++i) {
    const size_t from = place + i;
    const int32_t token = from < text.size() ? text[from] : drafts[first + from - text.size()];
    drafts.push_back(token);
  }
}

namespace {

class NgramDrafter final : public Drafter {
 public:
  void draft(std::span<Request* const> requests, int32_t max_drafts, int32_t) override {
    for (Request* const request : requests) {
      request->drafts.begin(request->tokens.back());
      indices_[request->id].guess(request->tokens, std::min(max_drafts, request->max_drafts()),
                                  request->drafts.tokens);
    }
  }
  void forget(int64_t request) override { indices_.erase(request); }

 private:
  std::unordered_map<int64_t, NgramIndex> indices_;  // by the request's id
};

}  // namespace

std::unique_ptr<Drafter> make_ngram_drafter() { return std::make_unique<NgramDrafter>(); }

}  // namespace fovea
