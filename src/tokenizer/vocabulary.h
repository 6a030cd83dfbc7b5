// SPDX-License-Identifier: Apache-2.0
// Token texts and ids, in both directions. All texts stand in one string, so that a vocabulary
// takes little more memory than its texts.
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

  // Makes `id` (at least 0) stand for `text`, and the other way round. The last text of an id and
  // the last id of a text count.
  void add(std::string_view text, int32_t id);
  // Makes `id` stand for `text`; find() does not see it.
  void set_text(int32_t id, std::string_view text);

  int32_t find(std::string_view text) const;  // the id, or kNone
  bool has(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < spans_.size() && spans_[id].begin != kAbsent;
  }
  // The text of an id that has() knows. add() and set_text() invalidate it.
  std::string_view text(int32_t id) const {
    return std::string_view(texts_).substr(spans_[id].begin, spans_[id].size);
  }
  int32_t size() const { return static_cast<int32_t>(spans_.size()); }  // the largest id + 1
  int32_t count() const { return count_; }                              // of texts with an id

 private:
  static constexpr size_t kAbsent = ~size_t{0};

  struct Span {
    size_t begin = kAbsent;  // in texts_
    size_t size = 0;
  };

  // Where `text` is in the table, or where it would be put.
  size_t slot_of(std::string_view text) const;
  void grow();

  std::string texts_;
  std::vector<Span> spans_;  // by id
  // Ids by the hash of their text, kNone where free; searched onwards from there. At most half of
  // the slots are in use, and their number is a power of two.
  std::vector<int32_t> slots_ = std::vector<int32_t>(64, kNone);
  std::vector<Span> keys_ = std::vector<Span>(64);  // by slot: the text that was added
  int32_t count_ = 0;
};

}  // namespace fovea
