// SPDX-License-Identifier: Apache-2.0
#include "engine/tokenizer_nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <vector>

#include "core/check.h"
#include "engine/tokenizer_utf8.h"

namespace fovea {
namespace {

bool is_mark(int32_t c) { return utf8proc_get_property(c)->combining_class != 0; }

// The full decomposition, marks not yet in order.
std::vector<int32_t> decompose(std::string_view text) {
  std::vector<int32_t> points;
  points.reserve(text.size());
  while (!text.empty()) {
    const size_t bytes = next_utf8(text).bytes;
    const auto point = static_cast<int32_t>(code_point(text.substr(0, bytes)));
    std::array<int32_t, 8> parts = {};  // no character has more than 4
    int boundary = 0;
    const auto count = utf8proc_decompose_char(
        point, parts.data(), parts.size(),
        static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), &boundary);
    if (count < 0) fail(ErrorCode::invalid_argument, "U+{:04X} cannot be decomposed", point);
    points.insert(points.end(), parts.begin(), parts.begin() + count);
    text.remove_prefix(bytes);
  }
  return points;
}

// utf8proc would order marks by insertion, quadratic in the length of a run of them.
void order_marks(std::vector<int32_t>& points) {
  for (auto begin = points.begin(); begin != points.end();) {
    begin = std::find_if(begin, points.end(), is_mark);
    const auto end = std::find_if_not(begin, points.end(), is_mark);
    std::stable_sort(begin, end, [](int32_t a, int32_t b) {
      return utf8proc_get_property(a)->combining_class < utf8proc_get_property(b)->combining_class;
    });
    begin = end;
  }
}

}  // namespace

std::string to_nfc(std::string_view text) {
  const auto is_ascii = [](char c) { return static_cast<unsigned char>(c) < 0x80; };
  if (std::all_of(text.begin(), text.end(), is_ascii)) return std::string(text);
  std::vector<int32_t> points = decompose(text);
  order_marks(points);
  const auto count =
      utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()),
                               static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  if (count < 0) fail(ErrorCode::invalid_argument, "the text cannot be normalised");
  points.resize(static_cast<size_t>(count));
  std::string out;
  out.reserve(text.size());
  for (const int32_t point : points) {
    std::array<uint8_t, 4> bytes = {};
    const auto length = utf8proc_encode_char(point, bytes.data());
    out.append(reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(length));
  }
  return out;
}

}  // namespace fovea
