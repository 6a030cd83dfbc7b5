// SPDX-License-Identifier: Apache-2.0
// Asking memory for what an item reads next.
#pragma once

#include "kernels/cpu/simd/attention_keys.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// The lines of an item's keys and values in the order in which it reads them: of a tile a group of
// keys of every head, then the next group, then the values alike, then the next tile. Row by row,
// as they lie: read in any other order, two threads get a fifth less from memory (2026-11-22).
class LinesAhead {
 public:
  LinesAhead(const KeyReader& reader, int64_t head_begin, int64_t head_end, int32_t group_keys)
      : head_begin_(head_begin),
        head_end_(head_end),
        group_keys_(group_keys),
        head_bytes_{reader.k_head_bytes, reader.v_head_bytes},
        lines_{static_cast<int32_t>((reader.k_row_bytes + 63) / 64),
               static_cast<int32_t>((reader.v_row_bytes + 63) / 64)},
        dense_{reader.k_token_bytes == 64 * lines_[0], reader.v_token_bytes == 64 * lines_[1]} {}

  // To the row `rows` rows after the first one of `tile`. `next` or null.
  void start(const TileKeys* tile, const TileKeys* next, int32_t rows) {
    tile_ = tile;
    next_ = next;
    value_ = 0;
    head_ = head_begin_;
    left_ = 0;
    start_group(tile->begin);
    while (key_ < group_end_ && rows >= group_end_ - key_) {
      rows -= group_end_ - key_;
      next_head();
    }
    key_ += rows;
    open();
  }

  // Asks for the next `count` lines. kLocality: as in __builtin_prefetch. A branch on what is left
  // of the run; a minimum with each line instead took f32 decode 1 to 11 % longer, bf16 and fp8 1
  // to 3 % (Emerald Rapids, Zen 5, 2026-11-23).
  template <int kLocality>
  HWY_INLINE void ask(int32_t count) {
    if (left_ > count) {
      for (int32_t i = 0; i < count; ++i) __builtin_prefetch(line_ + 64 * i, 0, kLocality);
      line_ += 64 * count;
      left_ -= count;
      return;
    }
    if (left_ <= 0) return;
    for (int32_t i = 0; i < left_; ++i) __builtin_prefetch(line_ + 64 * i, 0, kLocality);
    left_ = 0;
    advance();
  }

 private:
  void start_group(int32_t key) {
    group_ = key_ = key;
    group_end_ = smaller((key / group_keys_ + 1) * group_keys_, tile_->end);
  }

  // Leaves no keys in the group after the last tile.
  void next_head() {
    key_ = group_;
    if (++head_ < head_end_) return;
    head_ = head_begin_;
    if (group_end_ < tile_->end) return start_group(group_end_);
    value_ ^= 1;
    if (value_ == 0 || lines_[1] == 0) {
      value_ = 0;
      if (!next_) {
        key_ = group_end_;
        return;
      }
      tile_ = next_;
      next_ = nullptr;
    }
    start_group(tile_->begin);
  }

  // Rows of the head from key `key_` on that lie next to each other.
  void open() {
    if (key_ >= group_end_) return;
    const int32_t rows = dense_[value_] ? smaller(tile_->run[key_], group_end_ - key_) : 1;
    line_ = (value_ ? tile_->v : tile_->k)[key_] + head_ * head_bytes_[value_];
    left_ = rows * lines_[value_];
    key_ += rows;
  }

  void advance() {
    if (key_ >= group_end_) next_head();
    open();
  }

  const int64_t head_begin_, head_end_;
  const int32_t group_keys_;
  const int64_t head_bytes_[2];  // of keys, of values
  const int32_t lines_[2];       // of a row of a head
  const bool dense_[2];          // rows of neighbouring keys touch

  const TileKeys* tile_ = nullptr;
  const TileKeys* next_ = nullptr;
  int64_t head_ = 0;
  int32_t value_ = 0;                  // 1: at the values
  int32_t group_ = 0, group_end_ = 0;  // keys
  int32_t key_ = 0;                    // the next one of the head
  const char* line_ = nullptr;
  int32_t left_ = 0;  // lines from line_ on
};

// Two pages of 16 keys of one head, read by turns of 256 bytes. A row's place is then a constant of
// the instruction that reads it: 2 to 3 % of bf16 decode (2026-11-23).
template <int kRowBytes>
struct PagePair {
  static constexpr int kTurnLines = 8;
  static constexpr int kMostRows = 8;  // of queries: ItemPaths::direct
  static constexpr int32_t kWidth = kRowBytes / 2;

  const char* here[2];
  const char* near[2];
  const char* far[2];

  // Byte `at` of key first + i, first the first one of a turn.
  HWY_INLINE const char* row(int32_t first, int i, int64_t at) const {
    return here[first / 16 % 2] + (first % 16 + i) * kRowBytes + at;
  }

  // While lines first + part * kCount and on are read, first a multiple of kTurnLines: asks for
  // kCount, the near ones into the first cache, the far ones into the second.
  template <class T, int kCount>
  HWY_INLINE void ask(size_t first, int part) const {
    for (int i = part * kCount; i < (part + 1) * kCount; ++i) {
      const size_t at = first * 32 + static_cast<size_t>(i / 8 * 256 + i % 4 * 64);
      __builtin_prefetch(near[i / 4 % 2] + at, 0, 3);
      __builtin_prefetch(far[i / 4 % 2] + at, 0, 2);
    }
  }
};

// Rows of 2-byte numbers, 32 of a head, and those to ask for meanwhile: where a page starts memory
// answers late; two that start at once share that wait. Where two threads get 71 GB/s, bf16 so gets
// 0.75 instead of 0.70 of them (2026-11-22). f32 rows of 512 bytes take 3 % longer: 32 of them, and
// the next 32, leave the first cache no room.
class PagePairs {
 public:
  static constexpr int32_t kKeys = 32;

  PagePairs(const KeyReader& reader, int32_t head_begin, int32_t head_end)
      : head_begin_(head_begin),
        head_end_(head_end),
        head_bytes_{reader.k_head_bytes, reader.v_head_bytes},
        row_bytes_(reader.k_row_bytes),
        groups_near_(larger(static_cast<int32_t>(kBytesNear / (kKeys * reader.k_row_bytes)), 1)) {}

  // Keys and values of 64, 128 or 256 elements, the 16 of a page next to each other.
  static bool serves(const KeyReader& reader) {
    const int64_t bytes = reader.k_row_bytes;
    return element_bytes(reader.k_dtype) == 2 && element_bytes(reader.v_dtype) == 2 &&
           reader.page_size > 0 && reader.page_size % kPageKeys == 0 &&
           reader.k_token_bytes == bytes && reader.v_token_bytes == bytes &&
           bytes == reader.v_row_bytes && (bytes == 128 || bytes == 256 || bytes == 512);
  }

  // Before the first group of keys of the first head of `tile`; `next` may be empty.
  void start(const TileKeys* tile, const TileKeys* next) {
    here_ = {tile, next, 0, tile->begin / kKeys * kKeys, head_begin_, {}};
    open(here_);
    near_ = here_;
    for (int32_t i = 0; i < groups_near_; ++i) advance(near_);
    far_ = near_;
    for (int32_t i = 0; i < groups_near_; ++i) advance(far_);
  }

  // Before the next group or head.
  void step() {
    advance(here_);
    advance(near_);
    advance(far_);
  }

  // function(PagePair): this group of this head, and those 8 and 16 KiB later.
  template <class Function>
  HWY_INLINE void with_pair(const Function& function) const {
    switch (row_bytes_) {
      case 128:
        return function(pair<128>());
      case 256:
        return function(pair<256>());
      default:
        return function(pair<512>());
    }
  }

 private:
  static constexpr int64_t kBytesNear = 8 << 10;
  static constexpr int32_t kPageKeys = 16;

  // A group of one head.
  struct Place {
    const TileKeys* tile;
    const TileKeys* next;
    int32_t value;  // 1: at the values
    int32_t group;  // its first key
    int32_t head;
    const char* pages[2];
  };

  template <int kRowBytes>
  HWY_INLINE PagePair<kRowBytes> pair() const {
    return {{here_.pages[0], here_.pages[1]},
            {near_.pages[0], near_.pages[1]},
            {far_.pages[0], far_.pages[1]}};
  }

  // Stays at the last group of the last head.
  HWY_INLINE void advance(Place& place) const {
    if (++place.head >= head_end_) return advance_group(place);
    for (const char*& page : place.pages) page += head_bytes_[place.value];
  }

  void advance_group(Place& place) const {
    place.head = head_begin_;
    place.group += kKeys;
    if (place.group < place.tile->end) return open(place);
    if (place.value == 1) {
      if (!place.next || place.next->begin >= place.next->end) {
        place.head = head_end_ - 1;
        place.group -= kKeys;
        return;
      }
      place.tile = place.next;
      place.next = nullptr;
    }
    place.value ^= 1;
    place.group = place.tile->begin / kKeys * kKeys;
    open(place);
  }

  void open(Place& place) const {
    place.pages[0] = page(place, 0);
    place.pages[1] = page(place, kPageKeys);
  }

  // Where the page of key `key` of the group starts, or one of which the item reads some key.
  const char* page(const Place& place, int32_t key) const {
    const TileKeys& tile = *place.tile;
    const int32_t read = larger(tile.begin, smaller(tile.end - 1, place.group + key));
    const char* row = (place.value ? tile.v : tile.k)[read];
    return row - read % kPageKeys * row_bytes_ + place.head * head_bytes_[place.value];
  }

  const int32_t head_begin_, head_end_;
  const int64_t head_bytes_[2];  // of keys, of values
  const int64_t row_bytes_;
  const int32_t groups_near_;  // as many as fill kBytesNear

  Place here_ = {}, near_ = {}, far_ = {};
};

// Rows wherever they are, and what to ask for meanwhile: lines of the first cache and, unless fp8
// leaves no time for it, of the second, earlier: where two threads get 57 GB/s, f32 so gets 0.82
// instead of 0.78 of them (2026-11-22).
struct SingleRows {
  static constexpr int kTurnLines = 1;
  static constexpr int kMostRows = kBlockRows;
  static constexpr int32_t kWidth = 0;  // any

  const char* const* rows;
  int64_t offset;    // bytes, to the head
  LinesAhead* near;  // or null
  LinesAhead* far;

  // Byte `at` of key first + i.
  HWY_INLINE const char* row(int32_t first, int i, int64_t at) const {
    return rows[first + i] + (offset + at);
  }

  // While `kCount` lines are read as T.
  template <class T, int kCount>
  HWY_INLINE void ask(size_t, int) const {
    if (!near) return;
    near->template ask<3>(kCount);
    if constexpr (sizeof(T) > 1) far->template ask<2>(kCount);
  }
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
