// SPDX-License-Identifier: Apache-2.0
// Maps token texts to ids and back. All texts share one string, so that a vocabulary takes little
// more memory than its texts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

class Vocabulary {
 public:
  static constexpr int32_t kNone = -1;

  // Maps `id` (at least 0) to `text` and back. Later calls override the text of an id and the id of
  // a text.
  void add(std::string_view text, int32_t id);
  // Maps `id` to `text`, but not back: find() does not return it.
  void set_text(int32_t id, std::string_view text);

  int32_t find(std::string_view text) const;  // returns kNone if unknown
  bool has(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < spans_.size() && spans_[id].begin != kAbsent;
  }
  // Returns the text of an id for which has() is true. Invalidated by add() and set_text().
  std::string_view text(int32_t id) const {
    return std::string_view(texts_).substr(spans_[id].begin, spans_[id].size);
  }
  int32_t size() const { return static_cast<int32_t>(spans_.size()); }  // largest id + 1
  int32_t count() const { return count_; }  // number of texts with an id

 private:
  static constexpr size_t kAbsent = ~size_t{0};

  struct Span {
    size_t begin = kAbsent;  // position in texts_
    size_t size = 0;
  };

  // Returns the slot of `text`, or the free slot for it.
  size_t slot_of(std::string_view text) const;
  void grow();

  std::string texts_;
  std::vector<Span> spans_;  // per id
  // Hash table of ids by text, with linear probing; kNone marks a free slot. At most half of the
  // slots are in use, and their number is a power of two.
  std::vector<int32_t> slots_ = std::vector<int32_t>(64, kNone);
  std::vector<Span> keys_ = std::vector<Span>(64);  // per slot: the added text
  int32_t count_ = 0;
};

}  // namespace fovea
