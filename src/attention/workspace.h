// SPDX-License-Identifier: Apache-2.0
// One block of memory that a backend carves all its buffers from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string_view>

#include "core/check.h"
#include "fovea/device.h"
#include "gpu/gpu.h"

namespace fovea {

inline constexpr size_t kWorkspaceAlignment = 64;

// Hands out aligned pieces in order. Over a null base it only counts, so that the size of a
// workspace and its layout come from the same code.
class WorkspaceCarver {
 public:
  explicit WorkspaceCarver(std::byte* base) : base_(base) {}

  // `count` elements of T, aligned to 64 bytes; null when counting. Limits nobody can mean are
  // Error{out_of_memory} before the total could wrap.
  template <typename T>
  T* take(int64_t count) {
    if (count < 0 || count > kMaxPieceBytes / static_cast<int64_t>(sizeof(T))) {
      fail(ErrorCode::out_of_memory, "the limits need a workspace of more than 2^56 bytes");
    }
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return piece;
  }

  size_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kMaxPieceBytes = int64_t{1} << 56;

  std::byte* base_;
  size_t bytes_ = 0;
};

// A workspace that a backend allocates for itself, aligned.
class WorkspaceMemory {
 public:
  WorkspaceMemory() = default;
  // Error{out_of_memory} on a GPU that has no such block; std::bad_alloc on the CPU.
  WorkspaceMemory(Device device, size_t bytes);
  ~WorkspaceMemory();
  WorkspaceMemory(WorkspaceMemory&&) noexcept = default;
  WorkspaceMemory& operator=(WorkspaceMemory&&) noexcept = default;

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  struct AlignedDelete {
    void operator()(std::byte* memory) const {
      ::operator delete (memory, std::align_val_t{kWorkspaceAlignment});
    }
  };

  std::unique_ptr<std::byte, AlignedDelete> cpu_;
  std::unique_ptr<gpu::Context> context_;
  gpu::DeviceBuffer gpu_;
  std::span<std::byte> bytes_;
};

// The checks of every reserve(): Error{workspace_too_small} naming `needed`, or
// Error{invalid_argument} naming a misaligned address.
void check_workspace(std::span<std::byte> workspace, size_t needed, std::string_view backend);

}  // namespace fovea
