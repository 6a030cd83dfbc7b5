// SPDX-License-Identifier: Apache-2.0
// Opens a checkpoint: one file, or shards and their index.
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "core/check.h"
#include "core/mapped_file.h"
#include "core/quote.h"
#include "model/random_weights.h"
#include "model/safetensors.h"

namespace fovea {

Checkpoint Checkpoint::open(const std::string& folder) {
  namespace fs = std::filesystem;
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  const fs::path single = fs::path(folder) / "model.safetensors";
  const fs::path index = fs::path(folder) / "model.safetensors.index.json";
  std::error_code ignored;
  if (fs::exists(single, ignored)) {
    // The reference makes the same choice.
    if (fs::exists(index, ignored)) {
      checkpoint.note_ = fmt::format(
          "{}: model.safetensors is read; model.safetensors.index.json and its shards are not",
          printable(folder));
    }
    checkpoint.files_.push_back(SafetensorsFile::open(single.string()));
    return checkpoint;
  }
  if (!fs::exists(index, ignored)) {
    fail(
        ErrorCode::io,
        "{}: has neither model.safetensors nor model.safetensors.index.json; --random-weights SEED "
        "makes weights for its config.json",
        printable(folder));
  }
  checkpoint.open_shards(index.string());
  return checkpoint;
}

void Checkpoint::open_shards(const std::string& index) {
  const MappedFile file(index);
  index_ = read_checkpoint_index(file.text(), printable(index));
  const std::filesystem::path folder = std::filesystem::path(index).parent_path();
  for (const std::string& shard : index_.shards) {
    files_.push_back(SafetensorsFile::open((folder / shard).string()));
  }
  for (const auto& [tensor, shard] : index_.entries) {
    if (files_[shard].contains(tensor)) continue;
    fail(ErrorCode::corrupt_file, "{}: tensor {} belongs into {}, but is not in it",
         printable(index), quote(tensor), files_[shard].name());
  }
}

const SafetensorsFile* Checkpoint::file_of(std::string_view name) const {
  const auto named = std::lower_bound(
      index_.entries.begin(), index_.entries.end(), name,
      [](const CheckpointIndex::Entry& entry, std::string_view key) { return entry.tensor < key; });
  if (named != index_.entries.end() && named->tensor == name) return &files_[named->shard];
  const auto found = std::find_if(files_.begin(), files_.end(),
                                  [&](const auto& file) { return file.contains(name); });
  return found == files_.end() ? nullptr : &*found;
}

Checkpoint Checkpoint::random(const std::string& folder, const JsonObject& config, uint64_t seed,
                              ThreadPool& threads) {
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  checkpoint.random_ = std::make_shared<RandomWeights>(config, seed, threads);
  return checkpoint;
}

const StoredTensor& Checkpoint::tensor(std::string_view name, std::span<const int64_t> shape,
                                       const InitialValues& random) const {
  if (random_) return random_->tensor(name, shape, random);
  const StoredTensor* found = find(name);
  if (found == nullptr) {
    fail(ErrorCode::corrupt_file, "{}: tensor {} is missing; its shape would be {}",
         printable(folder_), quote(name), shape);
  }
  if (!std::equal(shape.begin(), shape.end(), found->shape.begin(), found->shape.end())) {
    fail(ErrorCode::corrupt_file, "{}: tensor {} has shape {}, must be {}", printable(folder_),
         quote(name), found->shape, shape);
  }
  return *found;
}

const StoredTensor* Checkpoint::find(std::string_view name) const {
  const SafetensorsFile* file = file_of(name);
  return file == nullptr ? nullptr : file->find(name);
}

void Checkpoint::check_intact() const {
  for (const SafetensorsFile& file : files_) file.check_intact();
}

size_t Checkpoint::bytes() const {
  size_t total = 0;
  for (const SafetensorsFile& file : files_) {
    for (const auto& [name, tensor] : file.tensors()) {
      if (file_of(name) == &file) total += tensor.bytes;
    }
  }
  return total;
}

}  // namespace fovea
