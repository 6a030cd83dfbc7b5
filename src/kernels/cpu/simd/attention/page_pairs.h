// SPDX-License-Identifier: Apache-2.0
// Reading keys and values from two pages at a time.
//
// Memory answers late at the start of a page. Two pages that start at once share that wait (chosen
// 2026-11-22: 7 % more of the read bandwidth for bf16 decode). Rows of f32 do not gain: two pages,
// and the two pages prefetched meanwhile, overflow the first-level cache.
#pragma once

#include "kernels/cpu/simd/attention/blocks.h"
#include "kernels/cpu/simd/attention/keys.h"

namespace fovea::kernels::cpu::FOVEA_ISA {
namespace {

// A group of 32 keys of one head in two pages of 16, read in stripes: 256 bytes of each page in
// turn. The row size is a constant, so that the address of a row is a constant offset in the
// instruction that reads it.
template <int kRowBytes>
struct PagePair {
  static constexpr int kStripeLines = 8;
  static constexpr int kMaxQueryRows = kFusedRows;  // as ItemModes::page_pairs needs fused_keys
  static constexpr int32_t kRowElements = kRowBytes / 2;

  const char* pages[2];
  const char* l1_pages[2];  // to prefetch into the first-level cache
  const char* l2_pages[2];  // to prefetch into the second level

  // Returns the address of byte `at` of key first + i, where `first` starts a stripe.
  HWY_INLINE const char* row(int32_t first, int i, int64_t at) const {
    return pages[first / 16 % 2] + (first % 16 + i) * kRowBytes + at;
  }

  // Prefetches kCount lines into each level, called while the lines from first + part * kCount on
  // are read. `first` is a multiple of kStripeLines.
  template <class T, int kCount>
  HWY_INLINE void prefetch(size_t first, int part) const {
    for (int i = part * kCount; i < (part + 1) * kCount; ++i) {
      const size_t at = first * 32 + static_cast<size_t>(i / 8 * 256 + i % 4 * 64);
      __builtin_prefetch(l1_pages[i / 4 % 2] + at, 0, 3);
      __builtin_prefetch(l2_pages[i / 4 % 2] + at, 0, 2);
    }
  }
};

// Walks over the groups of an item in the order in which it reads them: of 2-byte elements, all
// heads of a group of keys, then the next group of the tile, then the values, then the next tile.
class PagePairs {
 public:
  static constexpr int32_t kKeys = 32;

  PagePairs(const KeyReader& reader, int32_t head_begin, int32_t head_end)
      : head_begin_(head_begin),
        head_end_(head_end),
        head_bytes_{reader.k_head_bytes, reader.v_head_bytes},
        row_bytes_(reader.k_row_bytes),
        groups_ahead_(larger(static_cast<int32_t>(kBytesAhead / (kKeys * reader.k_row_bytes)), 1)) {
  }

  // Accepts keys and values of 64, 128 or 256 elements, the 16 rows of a page adjacent.
  static bool serves(const KeyReader& reader) {
    const int64_t bytes = reader.k_row_bytes;
    return element_bytes(reader.k_dtype) == 2 && element_bytes(reader.v_dtype) == 2 &&
           reader.page_size > 0 && reader.page_size % kPageKeys == 0 &&
           reader.k_token_bytes == bytes && reader.v_token_bytes == bytes &&
           bytes == reader.v_row_bytes && (bytes == 128 || bytes == 256 || bytes == 512);
  }

  // Moves to the first group of keys of the first head of `tile`; `next` may be empty.
  void start(const TileKeys* tile, const TileKeys* next) {
    current_ = {tile, next, 0, tile->begin / kKeys * kKeys, head_begin_, {}};
    open(current_);
    l1_ = current_;
    for (int32_t i = 0; i < groups_ahead_; ++i) advance(l1_);
    l2_ = l1_;
    for (int32_t i = 0; i < groups_ahead_; ++i) advance(l2_);
  }

  // Moves to the next head or group.
  void step() {
    advance(current_);
    advance(l1_);
    advance(l2_);
  }

  // Calls function(PagePair) for the current group and the groups kBytesAhead and twice as far
  // ahead.
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
  static constexpr int64_t kBytesAhead = 8 << 10;
  static constexpr int32_t kPageKeys = 16;

  // A group of one head.
  struct Position {
    const TileKeys* tile;
    const TileKeys* next;
    int32_t value;  // 0: keys, 1: values
    int32_t group;  // first key of the group
    int32_t head;
    const char* pages[2];
  };

  template <int kRowBytes>
  HWY_INLINE PagePair<kRowBytes> pair() const {
    return {{current_.pages[0], current_.pages[1]},
            {l1_.pages[0], l1_.pages[1]},
            {l2_.pages[0], l2_.pages[1]}};
  }

  // Stays at the last group of the last head.
  HWY_INLINE void advance(Position& position) const {
    if (++position.head >= head_end_) return advance_group(position);
    for (const char*& page : position.pages) page += head_bytes_[position.value];
  }

  void advance_group(Position& position) const {
    position.head = head_begin_;
    position.group += kKeys;
    if (position.group < position.tile->end) return open(position);
    if (position.value == 1) {
      if (!position.next || position.next->begin >= position.next->end) {
        position.head = head_end_ - 1;
        position.group -= kKeys;
        return;
      }
      position.tile = position.next;
      position.next = nullptr;
    }
    position.value ^= 1;
    position.group = position.tile->begin / kKeys * kKeys;
    open(position);
  }

  void open(Position& position) const {
    position.pages[0] = page(position, 0);
    position.pages[1] = page(position, kPageKeys);
  }

  // Returns the start of the page of key `key` of the group. If the item does not read that key, it
  // returns the page of the nearest key that the item reads.
  const char* page(const Position& position, int32_t key) const {
    const TileKeys& tile = *position.tile;
    const int32_t read = larger(tile.begin, smaller(tile.end - 1, position.group + key));
    const char* row = (position.value ? tile.v : tile.k)[read];
    return row - read % kPageKeys * row_bytes_ + position.head * head_bytes_[position.value];
  }

  const int32_t head_begin_, head_end_;
  const int64_t head_bytes_[2];  // from head to head: keys, values
  const int64_t row_bytes_;
  const int32_t groups_ahead_;  // that fill kBytesAhead

  Position current_ = {}, l1_ = {}, l2_ = {};
};

}  // namespace
}  // namespace fovea::kernels::cpu::FOVEA_ISA
