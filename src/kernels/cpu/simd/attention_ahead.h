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

  // Asks for the next `count` lines. kLocality: as in __builtin_prefetch.
  template <int kLocality>
  HWY_INLINE void ask(int32_t count) {
    if (left_ <= 0) return;
    for (int32_t i = 0; i < count; ++i) {
      __builtin_prefetch(line_ + 64 * smaller(i, left_ - 1), 0, kLocality);
    }
    line_ += 64 * count;
    left_ -= count;
    if (left_ <= 0) advance();
  }

  // The same, by a branch on what is left of the run instead of its minimum with each line: fp8 and
  // bf16 then take 1 to 3 % less time, f32 3 % more (2026-11-22).
  template <int kLocality>
  HWY_INLINE void ask_early(int32_t count) {
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

// The streams of lines that a product of few rows asks for: into the first cache, and, unless fp8
// leaves no time for it, earlier into the second: where two threads get 57 GB/s, f32 gets 0.82
// instead of 0.78 of them (2026-11-22).
struct LinesOfFewRows {
  LinesAhead near, far;

  template <class T>
  HWY_INLINE void ask(int32_t count) {
    if constexpr (sizeof(T) == sizeof(float)) {
      near.ask<3>(count);
      far.ask<2>(count);
    } else {
      near.ask_early<3>(count);
      if constexpr (sizeof(T) > 1) far.ask_early<2>(count);
    }
  }
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
