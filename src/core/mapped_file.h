// SPDX-License-Identifier: Apache-2.0
// A file mapped into memory, read-only.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace fovea {

struct Mapping;

// Unmaps in the destructor. Empty files are legal and have no bytes.
//
// Another process may shorten a file while it is mapped. The first mapping of a process installs a
// handler for SIGBUS, which such accesses raise: inside a mapped file it puts zeros in place of the
// missing pages, and check_intact() throws from then on. Any other SIGBUS goes to the handler that
// was there before.
class MappedFile {
 public:
  // Error{io} names the path and what the operating system said.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

  // Throws Error{io} with the path and both sizes where the file has become shorter than bytes().
  // Bytes that were read since then may be zeros. Costs one system call.
  void check_intact() const;

 private:
  std::string path_;
  int descriptor_ = -1;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  Mapping* mapping_ = nullptr;  // known to the handler
};

}  // namespace fovea
