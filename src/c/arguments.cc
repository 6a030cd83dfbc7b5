// SPDX-License-Identifier: Apache-2.0
#include "c/arguments.h"

#include <algorithm>

namespace fovea::c {
namespace {

// Structs of any version are smaller. A larger size is a mistake, and reading so far might crash.
constexpr size_t kMaxStructSize = 4096;
constexpr size_t kMinStructSize = 8;

}  // namespace

void check_pointer(const void* pointer, std::string_view name) {
  check(pointer != nullptr, "{} is null", name);
}

void check_alignment(const void* pointer, size_t alignment, std::string_view name) {
  check(reinterpret_cast<uintptr_t>(pointer) % alignment == 0,
        "{} is at {}, must be aligned to {} bytes", name, pointer, alignment);
}

void check_struct_size(const StructSize& size, std::string_view name) {
  check(size.given >= kMinStructSize && size.given <= kMaxStructSize &&
            size.given % size.alignment == 0,
        "{}.struct_size is {}, must be a multiple of {} in [{}, {}]: the init function sets it",
        name, size.given, size.alignment, kMinStructSize, kMaxStructSize);
}

void read_bytes(const void* given, void* out, StructSize size, std::string_view name) {
  check_struct_size(size, name);
  std::memcpy(out, given, std::min(size.given, size.known));
  const auto* bytes = static_cast<const unsigned char*>(given);
  for (size_t i = size.known; i < size.given; ++i) {
    check(bytes[i] == 0,
          "{} has a value at byte {} of {}: this library knows the first {} bytes and needs 0 in "
          "the others",
          name, i, size.given, size.known);
  }
}

void write_bytes(void* given, const void* values, StructSize size, std::string_view name) {
  check_struct_size(size, name);
  auto* to = static_cast<unsigned char*>(given);
  const auto* from = static_cast<const unsigned char*>(values);
  const size_t common = std::min(size.given, size.known), head = sizeof(uint32_t);
  std::memcpy(to + head, from + head, common - head);
  std::memset(to + common, 0, size.given - common);
}

void give_size(size_t needed, const void* buffer, size_t* size, std::string_view name) {
  check(size != nullptr, "the size of {} is null", name);
  check_alignment(size, alignof(size_t), "the size");
  const size_t capacity = *size;
  *size = needed;
  check(buffer == nullptr || capacity >= needed, "{} has room for {}, needs {}", name, capacity,
        needed);
}

void give_text(std::string_view value, char* text, size_t* bytes) {
  give_size(value.size() + 1, text, bytes, "text");
  if (text == nullptr) return;
  std::memcpy(text, value.data(), value.size());
  text[value.size()] = '\0';
}

std::string_view need_text(const char* text, std::string_view name) {
  check_pointer(text, name);
  return text;
}

bool to_flag(int32_t value, std::string_view name) {
  check(value == 0 || value == 1, "{} is {}, must be 0 or 1", name, value);
  return value == 1;
}

void check_reserved(int32_t value, std::string_view name) {
  check(value == 0, "{} is {}, must be 0", name, value);
}

}  // namespace fovea::c
