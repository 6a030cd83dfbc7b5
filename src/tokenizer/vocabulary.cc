// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/vocabulary.h"

#include <functional>
#include <utility>

namespace fovea {

void Vocabulary::set_text(int32_t id, std::string_view text) {
  if (spans_.size() <= static_cast<size_t>(id)) spans_.resize(static_cast<size_t>(id) + 1);
  spans_[id] = {texts_.size(), text.size()};
  texts_ += text;
}

void Vocabulary::add(std::string_view text, int32_t id) {
  set_text(id, text);
  if (static_cast<size_t>(count_) * 2 >= slots_.size()) grow();
  const size_t slot = slot_of(text);
  if (slots_[slot] == kNone) ++count_;
  slots_[slot] = id;
  keys_[slot] = spans_[id];
}

int32_t Vocabulary::find(std::string_view text) const { return slots_[slot_of(text)]; }

size_t Vocabulary::slot_of(std::string_view text) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = std::hash<std::string_view>{}(text)&mask;
  while (slots_[slot] != kNone &&
         std::string_view(texts_).substr(keys_[slot].begin, keys_[slot].size) != text) {
    slot = (slot + 1) & mask;
  }
  return slot;
}

void Vocabulary::grow() {
  std::vector<int32_t> ids(slots_.size() * 2, kNone);
  std::vector<Span> keys(ids.size());
  slots_.swap(ids);
  keys_.swap(keys);
  for (size_t old = 0; old < ids.size(); ++old) {
    if (ids[old] == kNone) continue;
    const size_t slot = slot_of(std::string_view(texts_).substr(keys[old].begin, keys[old].size));
    slots_[slot] = ids[old];
    keys_[slot] = keys[old];
  }
}

}  // namespace fovea
