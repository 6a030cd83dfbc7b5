// SPDX-License-Identifier: Apache-2.0
// A file mapped into memory, read-only.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace fovea {

// Unmaps in the destructor. Empty files are legal and have no bytes. A file that somebody shortens
// while it is mapped raises SIGBUS on access, as with every mapping.
class MappedFile {
 public:
  // Error{io} names the path and what the operating system said.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace fovea
