// SPDX-License-Identifier: Apache-2.0
// Reads and writes the arguments of C functions: structs of several versions, texts, arrays, enums
// and flags. All functions throw Error{invalid_argument} naming the argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include "c/status.h"

namespace fovea::c {

// The part of a struct that both the caller and this library know.
struct StructSize {
  size_t given;
  size_t known;
  size_t alignment;
};

void check_pointer(const void* pointer, std::string_view name);
void check_alignment(const void* pointer, size_t alignment, std::string_view name);
void check_struct_size(const StructSize& size, std::string_view name);
// Checks the struct and copies what the library knows of it to `out`.
void read_bytes(const void* given, void* out, StructSize size, std::string_view name);
// Copies `values` to the caller's struct, zeroes what the library does not know, and keeps the
// caller's struct_size.
void write_bytes(void* given, const void* values, StructSize size, std::string_view name);

// Returns the caller's size of a struct.
template <typename S>
StructSize struct_size_of(const S* given, std::string_view name) {
  static_assert(std::is_trivially_copyable_v<S> && offsetof(S, struct_size) == 0);
  check_pointer(given, name);
  check_alignment(given, alignof(S), name);
  return {given->struct_size, sizeof(S), alignof(S)};
}

// Returns the caller's struct over `defaults`.
template <typename S>
S read_struct(const S* given, S defaults, std::string_view name) {
  read_bytes(given, &defaults, struct_size_of(given, name), name);
  return defaults;
}

// Fills an output struct of the caller.
template <typename S>
void write_struct(S* given, const S& values, std::string_view name) {
  write_bytes(given, &values, struct_size_of(given, name), name);
}

// Implements the `..._init` functions.
template <typename S>
fovea_status init_struct(S* given, size_t struct_size, const S& defaults,
                         std::string_view name) noexcept {
  return guarded([&] {
    check_pointer(given, name);
    check_alignment(given, alignof(S), name);
    const StructSize size{struct_size, sizeof(S), alignof(S)};
    check_struct_size(size, name);
    given->struct_size = static_cast<uint32_t>(struct_size);
    write_bytes(given, &defaults, size, name);
  });
}

// Sets an output argument.
template <typename T>
void set(T* out, std::type_identity_t<T> value, std::string_view name) {
  check_pointer(out, name);
  check_alignment(out, alignof(T), name);
  *out = value;
}

// Implement the two calls for a text and for an array. `name` is the buffer's, `size_name` that of
// its size.
void give_text(std::string_view value, char* text, size_t* bytes);
void give_size(size_t needed, const void* buffer, size_t* size, std::string_view name);
template <typename T>
void give_array(std::span<const T> values, T* array, size_t* count, std::string_view name) {
  give_size(values.size(), array, count, name);
  if (array != nullptr && !values.empty()) {
    std::memcpy(array, values.data(), values.size_bytes());
  }
}

// Returns the entries of an array of the caller; null is empty.
template <typename T>
std::span<const T> entries(const T* array, size_t count, std::string_view name) {
  check(array != nullptr || count == 0, "{} is null, of {} entries", name, count);
  check(count <= PTRDIFF_MAX / sizeof(T), "{} has {} entries, at most {}", name, count,
        PTRDIFF_MAX / sizeof(T));
  check_alignment(array, alignof(T), name);
  return {array, count};
}

// Returns a text that must be given, or one that may be null.
std::string_view need_text(const char* text, std::string_view name);
inline std::string_view text_or_empty(const char* text) { return text == nullptr ? "" : text; }

template <typename Enum>
Enum to_enum(int32_t value, Enum last, std::string_view name) {
  check(value >= 0 && value <= static_cast<int32_t>(last), "{} is {}, must be in [0, {}]", name,
        value, static_cast<int32_t>(last));
  return static_cast<Enum>(value);
}
bool to_flag(int32_t value, std::string_view name);
// Checks a field that a later version may use.
void check_reserved(int32_t value, std::string_view name);

}  // namespace fovea::c
