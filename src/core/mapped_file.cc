// SPDX-License-Identifier: Apache-2.0
#include "core/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "core/bus_errors.h"
#include "core/check.h"
#include "core/quote.h"

namespace fovea {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int value() const { return value_; }
  int release() { return std::exchange(value_, -1); }

 private:
  int value_;
};

[[noreturn]] void fail_io(const std::string& path, const char* action, int error) {
  fail(ErrorCode::io, "{}: cannot {}: {}", printable(path), action,
       std::generic_category().message(error));
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a pipe must not block until a writer opens it.
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.value() < 0) fail_io(path, "open", errno);
  struct stat status = {};
  if (::fstat(file.value(), &status) != 0) fail_io(path, "stat", errno);
  if (!S_ISREG(status.st_mode)) fail(ErrorCode::io, "{}: is not a regular file", printable(path));
  if (status.st_size == 0) return;
  const auto size = static_cast<size_t>(status.st_size);
  mapping_ = take_mapping();
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.value(), 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    release_mapping(mapping_);
    fail_io(path, "map", error);
  }
  data_ = static_cast<const std::byte*>(data);
  size_ = size;
  watch(mapping_, data_, size_);
  descriptor_ = file.release();
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  release_mapping(mapping_);
  ::munmap(const_cast<std::byte*>(data_), size_);
  ::close(descriptor_);
}

void MappedFile::check_intact() const {
  if (data_ == nullptr) return;
  struct stat status = {};
  if (::fstat(descriptor_, &status) != 0) fail_io(path_, "stat", errno);
  const auto size = static_cast<size_t>(status.st_size);
  if (size < size_) {
    fail(ErrorCode::io, "{}: has been shortened from {} to {} bytes while it was in use",
         printable(path_), size_, size);
  }
  if (is_damaged(mapping_)) {
    fail(ErrorCode::io, "{}: a part of it could not be read, or was missing for a while",
         printable(path_));
  }
}

}  // namespace fovea
