// SPDX-License-Identifier: Apache-2.0
#include "kvcache/zeroed_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/check.h"

namespace fovea {

ZeroedMemory::ZeroedMemory(int64_t bytes, const char* what)
    : bytes_(static_cast<size_t>(std::max<int64_t>(bytes, 1))) {
  void* address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) {
    fail(ErrorCode::out_of_memory, "{} needs {} bytes, the system refused them: {}", what, bytes_,
         std::strerror(errno));
  }
  data_ = static_cast<char*>(address);
  // Strides between the rows of a head are at least a page of memory. Pages of 2 MiB make decode 10
  // % faster (one core of a Skylake server, 2026-11-21). The call is a hint and may fail.
  madvise(address, bytes_, MADV_HUGEPAGE);
}

ZeroedMemory::~ZeroedMemory() { munmap(data_, bytes_); }

}  // namespace fovea
