// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/unicode_forms.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "core/check.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

// Characters that got a combining class or a composition after Unicode 9.0, up to 15. The
// normalizer that made checkpoints' token ids (in the `tokenizers` package) uses 9.0 and leaves
// them unchanged.
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

// Compatibility decompositions added after 9.0.
constexpr std::array<std::array<int32_t, 2>, 9> kNewerCompatible = {{{0x32FF, 0x32FF},
                                                                     {0xA7F2, 0xA7F4},
                                                                     {0xAB69, 0xAB69},
                                                                     {0x10781, 0x10785},
                                                                     {0x10787, 0x107B0},
                                                                     {0x107B2, 0x107BA},
                                                                     {0x1E030, 0x1E06D},
                                                                     {0x1F16C, 0x1F16C},
                                                                     {0x1FBF0, 0x1FBF9}}};

// Marks (general category M) of 9.0 that are no marks in 15, and vice versa.
constexpr std::array<std::array<int32_t, 2>, 77> kOtherMarks = {
    {{0x7FD, 0x7FD},     {0x898, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},
     {0xAFA, 0xAFF},     {0xB55, 0xB55},     {0xC04, 0xC04},     {0xC3C, 0xC3C},
     {0xCF3, 0xCF3},     {0xD00, 0xD00},     {0xD3B, 0xD3C},     {0xD81, 0xD81},
     {0xEBA, 0xEBA},     {0xECE, 0xECE},     {0x1715, 0x1715},   {0x180F, 0x180F},
     {0x1ABF, 0x1ACE},   {0x1CF2, 0x1CF3},   {0x1CF7, 0x1CF7},   {0x1DF6, 0x1DFA},
     {0xA82C, 0xA82C},   {0xA8FF, 0xA8FF},   {0x10D24, 0x10D27}, {0x10EAB, 0x10EAC},
     {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070},
     {0x11073, 0x11074}, {0x110C2, 0x110C2}, {0x11145, 0x11146}, {0x111C9, 0x111C9},
     {0x111CE, 0x111CF}, {0x11241, 0x11241}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E},
     {0x1182C, 0x1183A}, {0x11930, 0x11935}, {0x11937, 0x11938}, {0x1193B, 0x1193E},
     {0x11940, 0x11940}, {0x11942, 0x11943}, {0x119D1, 0x119D7}, {0x119DA, 0x119E0},
     {0x119E4, 0x119E4}, {0x11A01, 0x11A0A}, {0x11A33, 0x11A39}, {0x11A3B, 0x11A3E},
     {0x11A47, 0x11A47}, {0x11A51, 0x11A5B}, {0x11A8A, 0x11A99}, {0x11D31, 0x11D36},
     {0x11D3A, 0x11D3A}, {0x11D3C, 0x11D3D}, {0x11D3F, 0x11D45}, {0x11D47, 0x11D47},
     {0x11D8A, 0x11D8E}, {0x11D90, 0x11D91}, {0x11D93, 0x11D97}, {0x11EF3, 0x11EF6},
     {0x11F00, 0x11F01}, {0x11F03, 0x11F03}, {0x11F34, 0x11F3A}, {0x11F3E, 0x11F42},
     {0x13440, 0x13440}, {0x13447, 0x13455}, {0x16F4F, 0x16F4F}, {0x16F7F, 0x16F87},
     {0x16FE4, 0x16FE4}, {0x16FF0, 0x16FF1}, {0x1CF00, 0x1CF2D}, {0x1CF30, 0x1CF46},
     {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF},
     {0x1E4EC, 0x1E4EF}}};

// Lower case mappings added after Unicode 15: characters [first, last] and the difference.
constexpr std::array<std::array<int32_t, 3>, 10> kNewerLower = {{{0x1C89, 0x1C89, 1},
                                                                 {0xA7CB, 0xA7CB, 0x264 - 0xA7CB},
                                                                 {0xA7CC, 0xA7CC, 1},
                                                                 {0xA7CE, 0xA7CE, 1},
                                                                 {0xA7D2, 0xA7D2, 1},
                                                                 {0xA7D4, 0xA7D4, 1},
                                                                 {0xA7DA, 0xA7DA, 1},
                                                                 {0xA7DC, 0xA7DC, 0x19B - 0xA7DC},
                                                                 {0x10D50, 0x10D65, 0x20},
                                                                 {0x16EA0, 0x16EB8, 0x1B}}};

// Returns the table's range that contains `c`, or null. Ranges are [first, last].
template <typename Table>
const typename Table::value_type* find_range(const Table& table, int32_t c) {
  const auto range = std::ranges::lower_bound(table, c, {}, [](const auto& r) { return r[1]; });
  return range != table.end() && (*range)[0] <= c ? &*range : nullptr;
}

bool is_newer(int32_t c) { return find_range(kNewer, c) != nullptr; }

bool has_combining_class(int32_t c) {
  return utf8proc_get_property(c)->combining_class != 0 && !is_newer(c);
}

// Returns the full decomposition, before marks are ordered.
std::vector<int32_t> decompose(std::string_view text, bool compatible) {
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
    std::array<int32_t, 32> parts = {};  // at most 18 are used
    int boundary = 0;
    int options = UTF8PROC_DECOMPOSE | UTF8PROC_STABLE;
    if (compatible && find_range(kNewerCompatible, point) == nullptr) options |= UTF8PROC_COMPAT;
    const auto count = utf8proc_decompose_char(point, parts.data(), parts.size(),
                                               static_cast<utf8proc_option_t>(options), &boundary);
    if (count < 0) fail(ErrorCode::invalid_argument, "U+{:04X} cannot be decomposed", point);
    points.insert(points.end(), parts.begin(), parts.begin() + count);
  }
  return points;
}

// Sorts marks in O(n log n); utf8proc's insertion sort is quadratic in the length of a run.
void order_marks(std::vector<int32_t>& points) {
  for (auto begin = points.begin(); begin != points.end();) {
    begin = std::find_if(begin, points.end(), has_combining_class);
    const auto end = std::find_if_not(begin, points.end(), has_combining_class);
    std::stable_sort(begin, end, [](int32_t a, int32_t b) {
      return utf8proc_get_property(a)->combining_class < utf8proc_get_property(b)->combining_class;
    });
    begin = end;
  }
}

// Composes, but not across newer characters.
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

bool is_ascii(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

}  // namespace

std::string to_form(UnicodeForm form, std::string_view text) {
  if (is_ascii(text)) return std::string(text);
  const bool compatible = form == UnicodeForm::nfkc || form == UnicodeForm::nfkd;
  std::vector<int32_t> points = decompose(text, compatible);
  order_marks(points);
  if (form == UnicodeForm::nfc || form == UnicodeForm::nfkc) points = compose(std::move(points));
  std::string out;
  out.reserve(text.size());
  for (const int32_t point : points) append_utf8(static_cast<uint32_t>(point), out);
  return out;
}

std::string to_lower(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t bytes = next_utf8(text).bytes;
    const auto point = static_cast<int32_t>(code_point(text.substr(0, bytes)));
    text.remove_prefix(bytes);
    if (point == 0x130) {  // the only character whose lower case has two characters
      out += "i\u0307";
      continue;
    }
    const auto* newer = find_range(kNewerLower, point);
    const int32_t lower = newer != nullptr ? point + (*newer)[2] : utf8proc_tolower(point);
    append_utf8(static_cast<uint32_t>(lower), out);
  }
  return out;
}

bool is_combining_mark(uint32_t point) {
  const auto c = static_cast<int32_t>(point);
  const auto category = utf8proc_category(c);
  const bool is_mark_now = category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_MC ||
                           category == UTF8PROC_CATEGORY_ME;
  return is_mark_now != (find_range(kOtherMarks, c) != nullptr);
}

}  // namespace fovea
