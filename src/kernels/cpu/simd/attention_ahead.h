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

// Asks for rows of 2-byte numbers, 32 of a head, two pages of 16: one of the first page, one of the
// second, and so on. Where a page starts memory answers late; two that start at once share that
// wait. Where two threads get 71 GB/s, bf16 so gets 0.75 instead of 0.70 of them (2026-11-22). f32
// rows of 512 bytes take 3 % longer: 32 of them, and the next 32, leave the first cache no room.
class PagePairsAhead {
 public:
  static constexpr int32_t kKeys = 32;

  PagePairsAhead(const KeyReader& reader, int32_t head_begin, int32_t head_end)
      : head_begin_(head_begin),
        head_end_(head_end),
        head_bytes_{reader.k_head_bytes, reader.v_head_bytes},
        row_lines_log2_(serves(reader) ? __builtin_ctzll(reader.k_row_bytes / 64) : 0),
        groups_near_(larger(static_cast<int32_t>(kBytesNear / (kKeys * reader.k_row_bytes)), 1)) {}

  // Keys and values of 64, 128 or 256 elements, so that no request crosses rows.
  static bool serves(const KeyReader& reader) {
    const int64_t bytes = reader.k_row_bytes;
    return element_bytes(reader.k_dtype) == 2 && element_bytes(reader.v_dtype) == 2 &&
           bytes == reader.v_row_bytes && (bytes == 128 || bytes == 256 || bytes == 512);
  }

  // Sets `asked` of a tile; keys that the item does not read are replaced by some that it does.
  static void set_order(TileKeys& tile) {
    if (tile.begin >= tile.end) return;
    for (int32_t i = 0; i < kTileKeys; ++i) {
      const int32_t key = i / kKeys * kKeys + i % 2 * (kKeys / 2) + i % kKeys / 2;
      const int32_t read = larger(tile.begin, smaller(tile.end - 1, key));
      tile.asked[0][i] = tile.k[read];
      tile.asked[1][i] = tile.v[read];
    }
  }

  // Before the first group of keys of the first head of `tile`; `next` may be empty.
  void start(const TileKeys* tile, const TileKeys* next) {
    near_ = {tile, next, 0, tile->begin / kKeys * kKeys, head_begin_};
    for (int32_t i = 0; i < groups_near_; ++i) advance(near_);
    far_ = near_;
    for (int32_t i = 0; i < groups_near_; ++i) advance(far_);
    set_rows();
  }

  // Before the next group or head.
  void step() {
    advance(near_);
    advance(far_);
    set_rows();
  }

  // While lines [first, first + kCount) of this group of this head are read: asks for as many, of
  // 8 KiB later into the first cache and of 16 KiB later into the second.
  template <int kCount>
  HWY_INLINE void ask(int32_t first) const {
    const int32_t row = first >> row_lines_log2_;
    const int64_t at = int64_t{first - (row << row_lines_log2_)} * 64;
    const char* near = near_rows_[row] + near_offset_ + at;
    const char* far = far_rows_[row] + far_offset_ + at;
    for (int32_t i = 0; i < kCount; ++i) {
      __builtin_prefetch(near + 64 * i, 0, 3);
      __builtin_prefetch(far + 64 * i, 0, 2);
    }
  }

 private:
  static constexpr int64_t kBytesNear = 8 << 10;

  // A group of one head.
  struct Place {
    const TileKeys* tile;
    const TileKeys* next;
    int32_t value;  // 1: at the values
    int32_t group;  // its first key
    int32_t head;
  };

  // Stays at the last group of the last head.
  void advance(Place& place) const {
    if (++place.head < head_end_) return;
    place.head = head_begin_;
    place.group += kKeys;
    if (place.group < place.tile->end) return;
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
  }

  void set_rows() {
    near_rows_ = near_.tile->asked[near_.value] + near_.group;
    near_offset_ = near_.head * head_bytes_[near_.value];
    far_rows_ = far_.tile->asked[far_.value] + far_.group;
    far_offset_ = far_.head * head_bytes_[far_.value];
  }

  const int32_t head_begin_, head_end_;
  const int64_t head_bytes_[2];  // of keys, of values
  const int32_t row_lines_log2_;
  const int32_t groups_near_;  // as many as fill kBytesNear

  Place near_ = {}, far_ = {};
  const char* const* near_rows_ = nullptr;  // [kKeys] of head 0
  const char* const* far_rows_ = nullptr;
  int64_t near_offset_ = 0, far_offset_ = 0;  // bytes, to the head
};

// What products of few rows ask for: lines of the first cache and, unless fp8 leaves no time for
// it, of the second, earlier: where two threads get 57 GB/s, f32 so gets 0.82 instead of 0.78 of
// them (2026-11-22).
struct LinesOfFewRows {
  LinesAhead near, far;
  PagePairsAhead pairs;
  bool by_pairs;  // instead of near and far

  // While lines [first, first + kCount) of a group of a head are read as T.
  template <class T, int kCount>
  HWY_INLINE void ask(int32_t first) {
    if constexpr (sizeof(T) == 2) {
      if (by_pairs) return pairs.template ask<kCount>(first);
    }
    near.ask<3>(kCount);
    if constexpr (sizeof(T) > 1) far.ask<2>(kCount);
  }
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
