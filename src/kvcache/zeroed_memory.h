// SPDX-License-Identifier: Apache-2.0
// Zeroed memory straight from the system: what nobody touches costs address space only, 2 MiB at a
// time where the system has pages of that size.
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
