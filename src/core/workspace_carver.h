// SPDX-License-Identifier: Apache-2.0
// Divides one block of memory into buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/check.h"
#include "core/rounding.h"

namespace fovea {

inline constexpr size_t kWorkspaceAlignment = 64;

// Returns aligned buffers in order. With a null base it only counts, so that one function computes
// both the size of a workspace and its layout.
class WorkspaceCarver {
 public:
  explicit WorkspaceCarver(std::byte* base) : base_(base) {}

  // Returns `count` elements of T, aligned to 64 bytes, or null when counting. Throws
  // Error{out_of_memory} for absurd sizes, before the total can overflow.
  template <typename T>
  T* take(int64_t count) {
    if (count < 0 || count > kMaxPieceBytes / static_cast<int64_t>(sizeof(T))) {
      fail(ErrorCode::out_of_memory, "the limits need a workspace of more than 2^56 bytes");
    }
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += round_up(bytes, kWorkspaceAlignment);
    return piece;
  }
  std::span<std::byte> take_bytes(size_t bytes) {
    return {take<std::byte>(static_cast<int64_t>(bytes)), bytes};
  }

  size_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kMaxPieceBytes = int64_t{1} << 56;

  std::byte* base_;
  size_t bytes_ = 0;
};

}  // namespace fovea
