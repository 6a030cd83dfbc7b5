// SPDX-License-Identifier: Apache-2.0
// Prefetching the keys and values that an item reads next.
#pragma once

#include "kernels/cpu/simd/attention/blocks.h"
#include "kernels/cpu/simd/attention/keys.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// Walks over the cache lines of an item's keys and values in the order in which the item reads
// them: a group of keys of every head, then the next group of the tile, then the values in the same
// order, then the next tile. Within a head it goes row by row, as the rows lie; memory answers any
// other order more slowly.
class PrefetchStream {
 public:
  PrefetchStream(const KeyReader& reader, int64_t head_begin, int64_t head_end, int32_t group_keys)
      : head_begin_(head_begin),
        head_end_(head_end),
        group_keys_(group_keys),
        head_bytes_{reader.k_head_bytes, reader.v_head_bytes},
        lines_{static_cast<int32_t>((reader.k_row_bytes + 63) / 64),
               static_cast<int32_t>((reader.v_row_bytes + 63) / 64)},
        dense_{reader.k_token_bytes == 64 * lines_[0], reader.v_token_bytes == 64 * lines_[1]} {}

  // Moves to the row that is `rows` rows after the first one of `tile`. `next` may be null.
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
    open_run();
  }

  // Prefetches the next `count` lines. kLocality is that of __builtin_prefetch. The branch is
  // faster than a minimum for each line (2026-11-23: 1 to 11 % of decode).
  template <int kLocality>
  HWY_INLINE void prefetch(int32_t count) {
    if (left_ > count) {
      for (int32_t i = 0; i < count; ++i) __builtin_prefetch(line_ + 64 * i, 0, kLocality);
      line_ += 64 * count;
      left_ -= count;
      return;
    }
    if (left_ <= 0) return;
    for (int32_t i = 0; i < left_; ++i) __builtin_prefetch(line_ + 64 * i, 0, kLocality);
    left_ = 0;
    next_run();
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

  // Opens the run of adjacent rows of the head that starts at key_.
  void open_run() {
    if (key_ >= group_end_) return;
    const int32_t rows = dense_[value_] ? smaller(tile_->run[key_], group_end_ - key_) : 1;
    line_ = (value_ ? tile_->v : tile_->k)[key_] + head_ * head_bytes_[value_];
    left_ = rows * lines_[value_];
    key_ += rows;
  }

  // Inlined, as many rows of a head are runs of their own.
  HWY_INLINE void next_run() {
    if (key_ >= group_end_) next_head();
    open_run();
  }

  const int64_t head_begin_, head_end_;
  const int32_t group_keys_;
  const int64_t head_bytes_[2];  // from head to head: keys, values
  const int32_t lines_[2];       // in a row: keys, values
  const bool dense_[2];          // rows of neighbouring keys touch

  const TileKeys* tile_ = nullptr;
  const TileKeys* next_ = nullptr;
  int64_t head_ = 0;
  int32_t value_ = 0;                  // 0: at the keys, 1: at the values
  int32_t group_ = 0, group_end_ = 0;  // keys of the group
  int32_t key_ = 0;                    // the next key of the head
  const char* line_ = nullptr;         // the next line of the run
  int32_t left_ = 0;                   // lines left in the run
};

// Rows of keys or values at any addresses, and the streams that prefetch while they are read. fp8
// bytes prefetch into the first level only: their conversion leaves no time for a second stream.
struct RowPointers {
  static constexpr int kStripeLines = 1;
  static constexpr int kMaxQueryRows = kBlockRows;
  static constexpr int32_t kRowElements = 0;  // any

  const char* const* rows;
  int64_t offset;             // bytes, to the head
  PrefetchStream* l1_stream;  // null: nothing is prefetched
  PrefetchStream* l2_stream;

  // Returns the address of byte `at` of key first + i.
  HWY_INLINE const char* row(int32_t first, int i, int64_t at) const {
    return rows[first + i] + (offset + at);
  }

  // Prefetches kCount lines, called while as many lines are read as T.
  template <class T, int kCount>
  HWY_INLINE void prefetch(size_t, int) const {
    if (!l1_stream) return;
    l1_stream->template prefetch<3>(kCount);
    if constexpr (sizeof(T) > 1) l2_stream->template prefetch<2>(kCount);
  }
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
