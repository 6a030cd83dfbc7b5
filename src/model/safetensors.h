// SPDX-License-Identifier: Apache-2.0
// Reads the safetensors format (https://huggingface.co/docs/safetensors) without trusting it:
// sizes, shapes, offsets, overlaps and gaps are checked before a tensor can be seen. Files are
// memory-mapped, never copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/dtype.h"
#include "model/checkpoint_index.h"

namespace fovea {

class MappedFile;

struct StoredTensor {
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;  // into the mapping, aligned to 1; null: `make` makes the bytes
  size_t bytes = 0;
  // Writes bytes [begin, begin + out.size()) of the tensor, whole elements of it.
  std::function<void(size_t begin, std::span<std::byte> out)> make;

  // Copies those bytes, or makes them.
  void read(size_t begin, std::span<std::byte> out) const;
};

// The values that random weights give a tensor. Files hold what they hold.
struct InitialValues {
  float mean = 0;
  float deviation = -1;  // negative: that of a matrix whose rows are multiplied, or of a bias

  static InitialValues constant(float value) { return {value, 0}; }
  static InitialValues of_fan_in(int64_t inputs);  // deviation 1 / sqrt(inputs)
};

// The tensors of one mapped file. Error{corrupt_file} names the file, the tensor and the bytes.
class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::string& path);
  // For tests and fuzzing: `bytes` must outlive the result.
  static SafetensorsFile parse(std::span<const std::byte> bytes, std::string_view name);

  const std::string& name() const { return name_; }
  const std::map<std::string, StoredTensor, std::less<>>& tensors() const { return tensors_; }

  // Null when missing. Error{unsupported} when its dtype is one that nothing here computes with
  // (BOOL, F64, ...): such tensors may be in a file as long as nobody asks for them.
  const StoredTensor* find(std::string_view tensor) const;
  bool contains(std::string_view tensor) const;  // of any dtype
  // Error{io} where the file has been shortened since it was opened.
  void check_intact() const;

 private:
  std::string name_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> unsupported_;  // tensor -> dtype
  std::shared_ptr<const MappedFile> mapping_;
};

class Config;
class RandomWeights;
class ThreadPool;

// A checkpoint folder: model.safetensors, or else the shards named by model.safetensors.index.json.
// A tensor is that of the shard the index names, whatever other shards hold under its name. Or
// tensors of any name and shape that are made when they are asked for.
class Checkpoint {
 public:
  static Checkpoint open(const std::string& folder);
  // Makes random weights in the config's dtype (see RandomWeights). `folder` is where other files
  // of the model are.
  static Checkpoint random(const std::string& folder, const Config& config, uint64_t seed,
                           ThreadPool& threads);

  // Error{corrupt_file} when missing or of another shape; the message names both shapes.
  const StoredTensor& tensor(std::string_view name, std::span<const int64_t> shape,
                             const InitialValues& random = {}) const;
  // As SafetensorsFile::find. Random weights have no tensor that nobody needs.
  const StoredTensor* find(std::string_view name) const;
  size_t bytes() const;  // of all tensors in files
  const std::string& folder() const { return folder_; }
  // A line that says which files are read where there are several choices; else empty.
  const std::string& note() const { return note_; }
  void check_intact() const;  // all files, as SafetensorsFile::check_intact
  bool is_random() const { return random_ != nullptr; }

 private:
  void open_shards(const std::string& index);
  const SafetensorsFile* file_of(std::string_view tensor) const;  // null where none has it

  std::string folder_, note_;
  std::vector<SafetensorsFile> files_;
  CheckpointIndex index_;                  // its shards are files_; empty: one file
  std::shared_ptr<RandomWeights> random_;  // instead of files
};

}  // namespace fovea
