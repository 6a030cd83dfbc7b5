// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "core/check.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

// What Unicode gave a combining class or a composition after 9.0, the version of the normaliser
// that checkpoints' token ids were made with (the `tokenizers` package): nothing special there. Up
// to Unicode 15.
constexpr std::array<std::array<int32_t, 2>, 38> kNewer = {
    {{0x7FD, 0x7FD},     {0x898, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},
     {0xC3C, 0xC3C},     {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},
     {0x1ABF, 0x1ACE},   {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x10D24, 0x10D27},
     {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85},
     {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A},
     {0x11930, 0x11930}, {0x11938, 0x11938}, {0x1193D, 0x1193E}, {0x11943, 0x11943},
     {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99},
     {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42},
     {0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE},
     {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}}};

bool is_newer(int32_t c) {
  const auto range = std::ranges::lower_bound(kNewer, c, {}, [](const auto& r) { return r[1]; });
  return range != kNewer.end() && (*range)[0] <= c;
}

bool is_mark(int32_t c) { return utf8proc_get_property(c)->combining_class != 0 && !is_newer(c); }

// The full decomposition, marks not yet in order.
std::vector<int32_t> decompose(std::string_view text) {
  std::vector<int32_t> points;
  points.reserve(text.size());
  while (!text.empty()) {
    const size_t bytes = next_utf8(text).bytes;
    const auto point = static_cast<int32_t>(code_point(text.substr(0, bytes)));
    text.remove_prefix(bytes);
    if (is_newer(point)) {
      points.push_back(point);
      continue;
    }
    std::array<int32_t, 8> parts = {};  // no character has more than 4
    int boundary = 0;
    const auto count = utf8proc_decompose_char(
        point, parts.data(), parts.size(),
        static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), &boundary);
    if (count < 0) fail(ErrorCode::invalid_argument, "U+{:04X} cannot be decomposed", point);
    points.insert(points.end(), parts.begin(), parts.begin() + count);
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

// Nothing is composed across a newer character.
std::vector<int32_t> compose(std::vector<int32_t> points) {
  std::vector<int32_t> composed;
  composed.reserve(points.size());
  for (auto begin = points.begin(); begin != points.end();) {
    const auto end = std::find_if(begin + 1, points.end(), is_newer);
    const auto count = utf8proc_normalize_utf32(
        &*begin, end - begin, static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
    if (count < 0) fail(ErrorCode::invalid_argument, "the text cannot be normalised");
    composed.insert(composed.end(), begin, begin + count);
    begin = end;
  }
  return composed;
}

}  // namespace

std::string to_nfc(std::string_view text) {
  const auto is_ascii = [](char c) { return static_cast<unsigned char>(c) < 0x80; };
  if (std::all_of(text.begin(), text.end(), is_ascii)) return std::string(text);
  std::vector<int32_t> points = decompose(text);
  order_marks(points);
  points = compose(std::move(points));
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
