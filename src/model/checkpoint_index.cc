// SPDX-License-Identifier: Apache-2.0
#include "model/checkpoint_index.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/quote.h"
#include "model/json.h"

namespace fovea {
namespace {

using nlohmann::json;

// Indices of models with thousands of experts take tens of megabytes.
constexpr size_t kMaxBytes = 100'000'000;
constexpr int kMaxDepth = 64;

// Reads the index event by event: {"metadata": ..., "weight_map": {"tensor": "shard"}}.
class IndexReader {
 public:
  explicit IndexReader(std::string_view name) : name_(name) {}

  CheckpointIndex take() {
    if (index_.entries.empty()) fail(ErrorCode::corrupt_file, "{}: has no weight_map", name_);
    auto& entries = index_.entries;
    std::sort(entries.begin(), entries.end(),
              [](const auto& a, const auto& b) { return a.tensor < b.tensor; });
    const auto twice =
        std::adjacent_find(entries.begin(), entries.end(),
                           [](const auto& a, const auto& b) { return a.tensor == b.tensor; });
    if (twice != entries.end()) {
      fail(ErrorCode::corrupt_file, "{}: tensor {} is there twice", name_, quote(twice->tensor));
    }
    return std::move(index_);
  }

  bool null() { return value("null"); }
  bool boolean(bool) { return value("a boolean"); }
  bool number_integer(json::number_integer_t number) { return value(std::to_string(number)); }
  bool number_unsigned(json::number_unsigned_t number) { return value(std::to_string(number)); }
  bool number_float(json::number_float_t, const std::string& text) { return value(clipped(text)); }
  bool binary(json::binary_t&) { return value("binary data"); }

  bool string(std::string& shard) {
    if (!in_weight_map()) return value("a text");
    const std::string forbidden("/\\\0", 3);
    if (shard.empty() || shard.starts_with('.') || shard.find_first_of(forbidden) != shard.npos) {
      fail(ErrorCode::corrupt_file,
           "{}: the shard of tensor {} is {}, must be a plain file name inside the folder", name_,
           quote(key_), quote(shard));
    }
    const auto [place, is_new] =
        shards_.try_emplace(shard, static_cast<uint32_t>(index_.shards.size()));
    if (is_new) index_.shards.push_back(shard);
    index_.entries.push_back({std::move(key_), place->second});
    return true;
  }

  bool key(std::string& text) {
    key_ = std::move(text);
    return true;
  }

  bool start_object(size_t) {
    if (in_weight_map()) refuse_shard("an object");
    if (depth_ == 1) is_weight_map_ = key_ == "weight_map";
    return descend();
  }
  bool start_array(size_t) {
    value("an array");
    return descend();
  }
  bool end_object() { return ascend(); }
  bool end_array() { return ascend(); }

  bool parse_error(size_t, const std::string&, const json::exception& error) {
    fail(ErrorCode::corrupt_file, "{}: {}", name_, json_problem(error));
  }

 private:
  bool in_weight_map() const { return is_weight_map_ && depth_ == 2; }

  // Refuses a value that cannot be a shard.
  bool value(std::string_view what) {
    if (in_weight_map()) refuse_shard(what);
    if (depth_ == 0) {
      fail(ErrorCode::corrupt_file, "{}: is {}, has no weight_map", name_, what);
    }
    return true;
  }

  [[noreturn]] void refuse_shard(std::string_view what) const {
    fail(ErrorCode::corrupt_file, "{}: the shard of tensor {} is {}, must be a file name", name_,
         quote(key_), what);
  }

  bool descend() {
    if (++depth_ > kMaxDepth) {
      fail(ErrorCode::corrupt_file, "{}: nested deeper than {} levels", name_, kMaxDepth);
    }
    return true;
  }
  bool ascend() {
    if (--depth_ == 1) is_weight_map_ = false;
    return true;
  }

  std::string_view name_;
  int depth_ = 0;
  bool is_weight_map_ = false;
  std::string key_;  // most recent key
  std::unordered_map<std::string, uint32_t> shards_;
  CheckpointIndex index_;
};

}  // namespace

CheckpointIndex read_checkpoint_index(std::string_view text, std::string_view name) {
  check_json_text(text, name, kMaxBytes);
  IndexReader reader(name);
  json::sax_parse(text.begin(), text.end(), &reader);
  return reader.take();
}

}  // namespace fovea
