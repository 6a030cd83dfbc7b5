// SPDX-License-Identifier: Apache-2.0
#include "model/safetensors.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/mapped_file.h"
#include "model/json.h"

namespace fovea {
namespace {

using nlohmann::json;

// The limit of the reference implementation.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kLengthBytes = sizeof(uint64_t);
constexpr size_t kMaxDimensions = 16;
constexpr int kMaxDepth = 128;  // nesting of values in ignored fields

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

struct StoredType {
  std::string_view name;
  int bits;
  std::optional<DType> dtype;  // nullopt if values can be skipped but not read
};

constexpr std::array<StoredType, 22> kStoredTypes = {{
    {"F32", 32, DType::f32},          {"F16", 16, DType::f16},
    {"BF16", 16, DType::bf16},        {"F8_E4M3", 8, DType::f8e4m3},
    {"F8_E5M2", 8, DType::f8e5m2},    {"I32", 32, DType::i32},
    {"I64", 64, DType::i64},          {"U8", 8, DType::u8},
    {"BOOL", 8, std::nullopt},        {"I8", 8, std::nullopt},
    {"I16", 16, std::nullopt},        {"U16", 16, std::nullopt},
    {"U32", 32, std::nullopt},        {"U64", 64, std::nullopt},
    {"F64", 64, std::nullopt},        {"C64", 64, std::nullopt},
    {"F8_E8M0", 8, std::nullopt},     {"F8_E4M3FNUZ", 8, std::nullopt},
    {"F8_E5M2FNUZ", 8, std::nullopt}, {"F4", 4, std::nullopt},
    {"F6_E2M3", 6, std::nullopt},     {"F6_E3M2", 6, std::nullopt},
}};

// One entry of the header.
struct Entry {
  std::string name;
  const StoredType* type = nullptr;
  std::vector<int64_t> shape;
  std::vector<uint64_t> offsets;  // begin, end; relative to the end of the header
  bool has_shape = false;
  bool has_offsets = false;
};

// Returns the tensor's bytes according to its shape, or nullopt if that is not a whole number of
// bytes below 2^64.
std::optional<uint64_t> shape_bytes(const Entry& entry) {
  // A zero dimension makes the product zero, however large the other dimensions are.
  if (std::find(entry.shape.begin(), entry.shape.end(), 0) != entry.shape.end()) return 0;
  uint64_t bits = static_cast<uint64_t>(entry.type->bits);
  for (const int64_t dimension : entry.shape) {
    if (__builtin_mul_overflow(bits, static_cast<uint64_t>(dimension), &bits)) return std::nullopt;
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

// Reads the header event by event, so that memory stays proportional to its size:
//   {"__metadata__": {"key": "text"}, "name": {"dtype": "F32", "shape": [2], "data_offsets": [0,
//   8]}}
// __metadata__ may be null. Other fields of a tensor may have any value and are ignored.
class HeaderReader : public nlohmann::json_sax<json> {
 public:
  HeaderReader(std::string_view file, uint64_t data_bytes) : file_(file), data_bytes_(data_bytes) {}

  std::vector<Entry> take_entries() { return std::move(entries_); }

  bool null() override {
    if (place_ == Place::header && entry_.name == kMetadata) {
      if (std::exchange(has_metadata_, true)) refuse("is there twice");
      return true;
    }
    return is_other_field() || unexpected("null");
  }
  bool boolean(bool) override { return is_other_field() || unexpected("a boolean"); }
  bool number_float(number_float_t, const string_t& text) override {
    if (is_other_field()) return true;
    unexpected(fmt::format("{}, which is no integer", clipped(text)));
  }
  bool binary(binary_t&) override { unexpected("binary data"); }

  bool number_integer(number_integer_t value) override {
    if (is_other_field()) return true;
    unexpected(fmt::format("{}, which is negative", value));
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::shape) {
      if (value > INT64_MAX) refuse(fmt::format("dimension {} does not fit 63 bits", value));
      if (entry_.shape.size() == kMaxDimensions) {
        refuse(fmt::format("has more than {} dimensions", kMaxDimensions));
      }
      entry_.shape.push_back(static_cast<int64_t>(value));
    } else if (place_ == Place::offsets) {
      if (entry_.offsets.size() == 2) refuse("data_offsets has more than two numbers");
      entry_.offsets.push_back(value);
    } else if (!is_other_field()) {
      unexpected(fmt::format("the number {}", value));
    }
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata || is_other_field()) return true;
    if (place_ != Place::tensor || field_ != "dtype") {
      unexpected(fmt::format("the text {}", quote(value)));
    }
    if (entry_.type != nullptr) refuse("has two dtype fields");
    for (const StoredType& type : kStoredTypes) {
      if (type.name == value) entry_.type = &type;
    }
    if (entry_.type == nullptr) refuse(fmt::format("unknown dtype {}", quote(value)));
    return true;
  }

  bool start_object(size_t) override {
    if (is_other_field()) return descend();
    if (place_ == Place::outside) {
      place_ = Place::header;
    } else if (place_ == Place::header && entry_.name == kMetadata) {
      if (std::exchange(has_metadata_, true)) refuse("is there twice");
      place_ = Place::metadata;
    } else if (place_ == Place::header) {
      place_ = Place::tensor;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(string_t& value) override {
    if (place_ == Place::header) {
      entry_ = Entry{};
      entry_.name = value;
    } else if (place_ == Place::tensor) {
      field_ = value;
    }
    return true;
  }

  bool end_object() override {
    if (depth_ > 0) return ascend();
    if (place_ == Place::tensor) {
      check_entry();
      entries_.push_back(std::move(entry_));
    }
    entry_ = Entry{};
    place_ = place_ == Place::header ? Place::outside : Place::header;
    return true;
  }

  bool start_array(size_t) override {
    if (is_other_field()) return descend();
    if (place_ == Place::tensor && field_ == "shape") {
      if (std::exchange(entry_.has_shape, true)) refuse("has two shape fields");
      place_ = Place::shape;
    } else if (place_ == Place::tensor && field_ == "data_offsets") {
      if (std::exchange(entry_.has_offsets, true)) refuse("has two data_offsets fields");
      place_ = Place::offsets;
    } else {
      unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    if (depth_ > 0) return ascend();
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(size_t, const std::string&, const json::exception& error) override {
    refuse(fmt::format("header: {}", json_problem(error)));
  }

 private:
  enum class Place { outside, header, metadata, tensor, shape, offsets };
  static constexpr std::string_view kMetadata = "__metadata__";

  // Returns true inside the value of an ignored field.
  bool is_other_field() const {
    if (place_ != Place::tensor) return false;
    return depth_ > 0 || (field_ != "dtype" && field_ != "shape" && field_ != "data_offsets");
  }
  bool descend() {
    if (++depth_ > kMaxDepth) {
      refuse(fmt::format("field {} is nested deeper than {} levels", quote(field_), kMaxDepth));
    }
    return true;
  }
  bool ascend() {
    --depth_;
    return true;
  }

  [[noreturn]] void refuse(std::string_view problem) const {
    if (entry_.name.empty()) fail(ErrorCode::corrupt_file, "{}: {}", file_, problem);
    fail(ErrorCode::corrupt_file, "{}: tensor {}: {}", file_, quote(entry_.name), problem);
  }

  [[noreturn]] bool unexpected(std::string_view what) const {
    constexpr std::array<std::string_view, 6> kWanted = {
        "the header is an object",       "a tensor is an object",
        "metadata holds texts",          "a tensor has a dtype text, a shape and data_offsets",
        "shape holds unsigned integers", "data_offsets holds two unsigned integers"};
    refuse(fmt::format("{}; found {}", kWanted[static_cast<size_t>(place_)], what));
  }

  void check_entry() const {
    if (entry_.type == nullptr) refuse("has no dtype");
    if (!entry_.has_shape) refuse("has no shape");
    if (entry_.offsets.size() != 2) refuse("data_offsets is not two numbers");
    const auto [begin, end] = std::pair(entry_.offsets[0], entry_.offsets[1]);
    if (begin > end) refuse(fmt::format("data_offsets [{}, {}] run backwards", begin, end));
    if (end > data_bytes_) {
      refuse(fmt::format("data_offsets [{}, {}] reach past the {} bytes of data", begin, end,
                         data_bytes_));
    }
    const std::optional<uint64_t> bytes = shape_bytes(entry_);
    if (!bytes) {
      refuse(fmt::format("shape {} of {} is no countable number of bytes", entry_.shape,
                         entry_.type->name));
    }
    if (*bytes != end - begin) {
      refuse(fmt::format("shape {} of {} needs {} bytes, data_offsets [{}, {}] hold {}",
                         entry_.shape, entry_.type->name, *bytes, begin, end, end - begin));
    }
  }

  std::string_view file_;
  uint64_t data_bytes_;
  Place place_ = Place::outside;
  bool has_metadata_ = false;
  std::string field_;  // current field of the current tensor
  int depth_ = 0;      // nesting of objects and arrays in an ignored field
  Entry entry_;        // current tensor
  std::vector<Entry> entries_;
};

// Checks that the data of the tensors, in any order of the header, fills the rest of the file
// without gaps or overlaps. Sorts the entries by their data.
void check_coverage(std::vector<Entry>& entries, uint64_t data_bytes, std::string_view file) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.offsets, a.name) < std::tie(b.offsets, b.name);
  });
  uint64_t covered = 0;
  std::string_view before = "the start of the data";
  for (const Entry& entry : entries) {
    if (entry.offsets[0] != covered) {
      fail(ErrorCode::corrupt_file,
           "{}: tensor {} begins at byte {} of the data, but {} ends at byte {}: {}", file,
           quote(entry.name), entry.offsets[0], quote(before), covered,
           entry.offsets[0] < covered ? "they overlap" : "there is a gap");
    }
    covered = entry.offsets[1];
    before = entry.name;
  }
  if (covered != data_bytes) {
    fail(ErrorCode::corrupt_file, "{}: {} ends at byte {} of the data, which has {} bytes", file,
         quote(before), covered, data_bytes);
  }
}

// Splits a file into header text and data.
std::pair<std::string_view, std::span<const std::byte>> split_file(std::span<const std::byte> bytes,
                                                                   std::string_view name) {
  if (bytes.size() < kLengthBytes) {
    fail(ErrorCode::corrupt_file, "{}: {} bytes, too short for the length of a header", name,
         bytes.size());
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), kLengthBytes);
  const auto rest = bytes.subspan(kLengthBytes);
  if (header_bytes > kMaxHeaderBytes) {
    fail(ErrorCode::corrupt_file, "{}: header of {} bytes, the limit is {}", name, header_bytes,
         kMaxHeaderBytes);
  }
  if (header_bytes > rest.size()) {
    fail(ErrorCode::corrupt_file, "{}: header of {} bytes, but only {} bytes follow", name,
         header_bytes, rest.size());
  }
  const std::string_view header(reinterpret_cast<const char*>(rest.data()), header_bytes);
  // The parser would treat a NUL as the end of the text.
  if (const size_t at = header.find('\0'); at != header.npos) {
    fail(ErrorCode::corrupt_file, "{}: byte {} of the header is NUL", name, at);
  }
  return {header, rest.subspan(header_bytes)};
}

}  // namespace

void StoredTensor::read(size_t begin, std::span<std::byte> out) const {
  check_argument(begin <= bytes && out.size() <= bytes - begin,
                 "bytes [{}, {}) are read of a tensor of {}", begin, begin + out.size(), bytes);
  if (data == nullptr) return make(begin, out);
  std::copy_n(data + begin, out.size(), out.data());
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  auto mapping = std::make_shared<const MappedFile>(path);
  SafetensorsFile file = parse(mapping->bytes(), path);
  file.mapping_ = std::move(mapping);
  return file;
}

SafetensorsFile SafetensorsFile::parse(std::span<const std::byte> bytes, std::string_view name) {
  SafetensorsFile file;
  file.name_ = printable(name);
  const auto [header, data] = split_file(bytes, file.name_);
  HeaderReader reader(file.name_, data.size());
  json::sax_parse(header.begin(), header.end(), &reader);
  std::vector<Entry> entries = reader.take_entries();
  for (const Entry& entry : entries) {
    if (file.contains(entry.name)) {
      fail(ErrorCode::corrupt_file, "{}: tensor {} is there twice", file.name_, quote(entry.name));
    }
    if (!entry.type->dtype) {
      file.unsupported_.emplace(entry.name, entry.type->name);
      continue;
    }
    file.tensors_.emplace(
        entry.name, StoredTensor{*entry.type->dtype, entry.shape, data.data() + entry.offsets[0],
                                 static_cast<size_t>(entry.offsets[1] - entry.offsets[0])});
  }
  check_coverage(entries, data.size(), file.name_);
  return file;
}

const StoredTensor* SafetensorsFile::find(std::string_view tensor) const {
  const auto found = tensors_.find(tensor);
  if (found != tensors_.end()) return &found->second;
  const auto refused = unsupported_.find(tensor);
  if (refused != unsupported_.end()) {
    fail(ErrorCode::unsupported, "{}: tensor {} has dtype {}, which is not supported", name_,
         quote(tensor), refused->second);
  }
  return nullptr;
}

void SafetensorsFile::check_intact() const {
  if (mapping_ != nullptr) mapping_->check_intact();
}

bool SafetensorsFile::contains(std::string_view tensor) const {
  return tensors_.contains(tensor) || unsupported_.contains(tensor);
}

}  // namespace fovea
