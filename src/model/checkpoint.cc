// SPDX-License-Identifier: Apache-2.0
// Checkpoint: one file, or shards and the index that says which tensor is where.
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "core/check.h"
#include "core/mapped_file.h"
#include "model/json.h"
#include "model/safetensors.h"

namespace fovea {
namespace {

using nlohmann::json;

// tensor -> shard, with the names of the shards checked.
std::map<std::string, std::string> read_index(const std::string& path) {
  const MappedFile file(path);
  // Indices of models with thousands of experts have tens of megabytes.
  const json document = parse_json(file.text(), path, JsonLimits{100'000'000, 8});
  const auto weight_map = document.is_object() ? document.find("weight_map") : document.end();
  if (weight_map == document.end() || !weight_map->is_object() || weight_map->empty()) {
    fail(ErrorCode::corrupt_file, "{}: has no weight_map", path);
  }
  std::map<std::string, std::string> shards;
  for (const auto& [tensor, shard] : weight_map->items()) {
    if (!shard.is_string()) {
      fail(ErrorCode::corrupt_file, "{}: the shard of tensor '{}' is {}, must be a file name", path,
           clipped(tensor), json_shown(shard));
    }
    const auto& name = shard.get_ref<const std::string&>();
    const std::string forbidden("/\\\0", 3);
    if (name.empty() || name.starts_with('.') || name.find_first_of(forbidden) != name.npos) {
      fail(ErrorCode::corrupt_file,
           "{}: the shard of tensor '{}' is '{}', must be a plain file name inside the folder",
           path, clipped(tensor), clipped(name));
    }
    shards.emplace(tensor, name);
  }
  return shards;
}

}  // namespace

Checkpoint Checkpoint::open(const std::string& folder) {
  namespace fs = std::filesystem;
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  const fs::path single = fs::path(folder) / "model.safetensors";
  const fs::path index = fs::path(folder) / "model.safetensors.index.json";
  std::error_code ignored;
  if (fs::exists(single, ignored)) {
    checkpoint.files_.push_back(SafetensorsFile::open(single.string()));
    return checkpoint;
  }
  if (!fs::exists(index, ignored)) {
    fail(ErrorCode::io, "{}: has neither model.safetensors nor model.safetensors.index.json",
         folder);
  }
  const std::map<std::string, std::string> shards = read_index(index.string());
  std::map<std::string, size_t> opened;  // shard -> its place in files_
  for (const auto& [tensor, shard] : shards) {
    if (!opened.emplace(shard, checkpoint.files_.size()).second) continue;
    checkpoint.files_.push_back(SafetensorsFile::open((fs::path(folder) / shard).string()));
  }
  for (const auto& [tensor, shard] : shards) {
    for (size_t i = 0; i < checkpoint.files_.size(); ++i) {
      const bool wanted = i == opened.at(shard);
      if (checkpoint.files_[i].contains(tensor) == wanted) continue;
      fail(ErrorCode::corrupt_file, "{}: tensor '{}' belongs into {}, but {} {}", index.string(),
           clipped(tensor), shard, wanted ? "is not in" : "is also in",
           checkpoint.files_[i].name());
    }
  }
  return checkpoint;
}

const StoredTensor& Checkpoint::tensor(std::string_view name,
                                       std::span<const int64_t> shape) const {
  const StoredTensor* found = find(name);
  if (found == nullptr) {
    fail(ErrorCode::corrupt_file, "{}: tensor '{}' is missing; its shape would be {}", folder_,
         name, shape);
  }
  if (!std::equal(shape.begin(), shape.end(), found->shape.begin(), found->shape.end())) {
    fail(ErrorCode::corrupt_file, "{}: tensor '{}' has shape {}, must be {}", folder_, name,
         found->shape, shape);
  }
  return *found;
}

const StoredTensor* Checkpoint::find(std::string_view name) const {
  for (const SafetensorsFile& file : files_) {
    if (const StoredTensor* tensor = file.find(name)) return tensor;
  }
  return nullptr;
}

size_t Checkpoint::bytes() const {
  size_t total = 0;
  for (const SafetensorsFile& file : files_) {
    for (const auto& [name, tensor] : file.tensors()) total += tensor.bytes;
  }
  return total;
}

}  // namespace fovea
