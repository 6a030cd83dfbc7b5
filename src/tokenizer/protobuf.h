// SPDX-License-Identifier: Apache-2.0
// Reads the wire format of protocol buffers, field by field.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace fovea {

struct ProtobufField {
  uint32_t number = 0;
  uint64_t integer = 0;    // value of a varint, or the bits of a fixed number
  std::string_view bytes;  // contents of a string or a message
};

class ProtobufReader {
 public:
  // `name` is the file.
  ProtobufReader(std::string_view message, std::string_view name) : rest_(message), name_(name) {}

  // Returns the next field, or nullopt at the end of the message. Throws Error{corrupt_file} if the
  // bytes are no field, or a field of a deprecated kind.
  std::optional<ProtobufField> next();

 private:
  uint64_t varint();
  std::string_view take(uint64_t bytes);
  [[noreturn]] void corrupt() const;

  std::string_view rest_;
  std::string_view name_;
};

}  // namespace fovea
