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
// Another process may truncate a file while it is mapped. Reads past its end then raise SIGBUS. The
// first MappedFile of a process installs a handler that puts zeros in place of the missing pages of
// mapped files; check_intact() throws from then on. Any other SIGBUS goes to the previously
// installed handler.
class MappedFile {
 public:
  // Throws Error{io} with the path and the operating system's message.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

  // Throws Error{io} with the path and both sizes if the file is now shorter than bytes(). Bytes
  // read since the truncation may be zeros. Costs one system call.
  void check_intact() const;

 private:
  std::string path_;
  int descriptor_ = -1;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  Mapping* mapping_ = nullptr;  // entry of the SIGBUS handler
};

}  // namespace fovea
