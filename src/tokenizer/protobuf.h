// SPDX-License-Identifier: Apache-2.0
// Reads the wire format of protocol buffers, field by field.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace fovea {

struct ProtobufField {
  uint32_t number = 0;
  uint64_t integer = 0;    // of a varint, and the bits of a fixed number
  std::string_view bytes;  // of a string or a message
};

class ProtobufReader {
 public:
  // `name` is the file.
  ProtobufReader(std::string_view message, std::string_view name) : rest_(message), name_(name) {}

  // The next field, or nullopt at the end of the message. Error{corrupt_file} where the bytes are
  // no field, or one of a kind that nobody writes any more.
  std::optional<ProtobufField> next();

 private:
  uint64_t varint();
  std::string_view take(uint64_t bytes);
  [[noreturn]] void corrupt() const;

  std::string_view rest_;
  std::string_view name_;
};

}  // namespace fovea
