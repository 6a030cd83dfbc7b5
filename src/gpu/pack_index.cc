// SPDX-License-Identifier: Apache-2.0
#include "gpu/pack_index.h"

#include <algorithm>
#include <charconv>

#include "core/check.h"
#include "core/quote.h"

namespace fovea::gpu {
namespace {

// The largest kernel in use has less than 1 MB.
constexpr uint64_t kMaxCubinBytes = uint64_t{64} << 20;
constexpr uint64_t kMaxResourceBytes = 1 << 24;

std::string replace_all(std::string text, char from, char to) {
  std::ranges::replace(text, from, to);
  return text;
}

// Reads the fields of one line from left to right.
class LineReader {
 public:
  LineReader(const std::string& path, std::string_view line) : path_(path), rest_(line) {}

  // Returns the value of the next field, which must be called `key`.
  std::string_view text(std::string_view key) {
    const size_t end = std::min(rest_.find('\t'), rest_.size());
    const std::string_view value = value_of(rest_.substr(0, end), key);
    rest_.remove_prefix(std::min(end + 1, rest_.size()));
    return value;
  }

  uint64_t number(std::string_view key, uint64_t max = UINT64_MAX) {
    const std::string_view value = text(key);
    uint64_t number = 0;
    if (!parses_whole(value, number) || number > max) {
      fail(ErrorCode::corrupt_file, "{}: {} is {}, must be a whole number in [0, {}]", path_, key,
           quote(value), max);
    }
    return number;
  }

  int resource(std::string_view key, uint64_t max = kMaxResourceBytes) {
    return static_cast<int>(number(key, max));
  }

  double seconds(std::string_view key) {
    const std::string_view value = text(key);
    double seconds = 0;
    if (!parses_whole(value, seconds) || !(seconds >= 0 && seconds <= 1e6)) {
      fail(ErrorCode::corrupt_file, "{}: {} is {}, must be in [0, 1e6]", path_, key, quote(value));
    }
    return seconds;
  }

  // Returns the value of the last field, which may contain tabs.
  std::string_view last(std::string_view key) { return value_of(rest_, key); }

 private:
  std::string_view value_of(std::string_view field, std::string_view key) const {
    if (!field.starts_with(key) || !field.substr(key.size()).starts_with('=')) {
      fail(ErrorCode::corrupt_file, "{}: the index has {} where {} is expected", path_,
           quote(field), key);
    }
    return field.substr(key.size() + 1);
  }

  template <typename Number>
  static bool parses_whole(std::string_view text, Number& number) {
    const char* end = text.data() + text.size();
    const auto [stopped, error] = std::from_chars(text.data(), end, number);
    return error == std::errc() && stopped == end;
  }

  const std::string& path_;
  std::string_view rest_;
};

PackIndexEntry parse_line(const std::string& path, std::string_view line) {
  LineReader fields(path, line);
  PackIndexEntry entry;
  entry.name = fields.text("name");
  entry.hash = fields.text("hash");
  entry.offset = fields.number("offset");
  entry.frame_bytes = fields.number("frame_bytes");
  entry.cubin_bytes = fields.number("cubin_bytes", kMaxCubinBytes);
  entry.seconds = fields.seconds("seconds");
  entry.resources.registers = fields.resource("registers", 255);
  entry.resources.spill_bytes = fields.resource("spill_bytes");
  entry.resources.stack_bytes = fields.resource("stack_bytes");
  entry.resources.shared_bytes = fields.resource("shared_bytes");
  entry.resources.losses = replace_all(std::string(fields.last("losses")), '\t', '\n');
  return entry;
}

}  // namespace

std::string pack_index_line(const PackIndexEntry& entry) {
  const ResourceUse& use = entry.resources;
  return fmt::format(
      "name={}\thash={}\toffset={}\tframe_bytes={}\tcubin_bytes={}\tseconds={}\tregisters={}"
      "\tspill_bytes={}\tstack_bytes={}\tshared_bytes={}\tlosses={}\n",
      entry.name, entry.hash, entry.offset, entry.frame_bytes, entry.cubin_bytes, entry.seconds,
      use.registers, use.spill_bytes, use.stack_bytes, use.shared_bytes,
      replace_all(use.losses, '\n', '\t'));
}

std::vector<PackIndexEntry> parse_pack_index(const std::string& path, std::string_view text) {
  std::vector<PackIndexEntry> entries;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (end == text.npos) {
      fail(ErrorCode::corrupt_file, "{}: the last line of the index has no end", path);
    }
    entries.push_back(parse_line(path, text.substr(0, end)));
    text.remove_prefix(end + 1);
  }
  return entries;
}

}  // namespace fovea::gpu
