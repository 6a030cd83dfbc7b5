// SPDX-License-Identifier: Apache-2.0
// Zeroed memory from the operating system. Pages that were never written cost address space only,
// in steps of 2 MiB if the system has pages of that size.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fovea {

class ZeroedMemory {
 public:
  // Throws Error{out_of_memory}: "<what> needs <bytes> bytes".
  ZeroedMemory(int64_t bytes, const char* what);
  ~ZeroedMemory();
  ZeroedMemory(const ZeroedMemory&) = delete;
  ZeroedMemory& operator=(const ZeroedMemory&) = delete;

  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  size_t bytes_;
};

}  // namespace fovea
