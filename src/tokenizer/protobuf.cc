// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/protobuf.h"

#include "core/check.h"

namespace fovea {

void ProtobufReader::corrupt() const {
  fail(ErrorCode::corrupt_file, "{}: is no protocol buffer, {} bytes before the end of a message",
       name_, rest_.size());
}

uint64_t ProtobufReader::varint() {
  uint64_t value = 0;
  for (uint32_t shift = 0; shift < 64; shift += 7) {
    if (rest_.empty()) corrupt();
    const auto byte = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    value |= static_cast<uint64_t>(byte & 0x7F) << shift;
    if (byte < 0x80) return value;
  }
  corrupt();
}

std::string_view ProtobufReader::take(uint64_t bytes) {
  if (bytes > rest_.size()) corrupt();
  const std::string_view taken = rest_.substr(0, bytes);
  rest_.remove_prefix(bytes);
  return taken;
}

std::optional<ProtobufField> ProtobufReader::next() {
  if (rest_.empty()) return std::nullopt;
  const uint64_t key = varint();
  ProtobufField field;
  if (key >> 3 == 0 || key >> 3 >= 1u << 29) corrupt();
  field.number = static_cast<uint32_t>(key >> 3);
  switch (key & 7) {
    case 0:
      field.integer = varint();
      return field;
    case 1:
    case 5: {
      const std::string_view bytes = take((key & 7) == 1 ? 8 : 4);
      for (size_t i = bytes.size(); i-- > 0;) {
        field.integer = field.integer << 8 | static_cast<uint8_t>(bytes[i]);
      }
      return field;
    }
    case 2:
      field.bytes = take(varint());
      return field;
    default:
      corrupt();
  }
}

}  // namespace fovea
