// SPDX-License-Identifier: Apache-2.0
// Reads the safetensors format (https://huggingface.co/docs/safetensors) from untrusted files:
// checks sizes, shapes, offsets, overlaps and gaps before it returns any tensor. Files are
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
  // Points into the mapping, aligned to 1; null if `make` generates the bytes.
  const std::byte* data = nullptr;
  size_t bytes = 0;
  // Writes bytes [begin, begin + out.size()) of the tensor; the range consists of whole elements.
  std::function<void(size_t begin, std::span<std::byte> out)> make;

  // Copies or generates those bytes.
  void read(size_t begin, std::span<std::byte> out) const;
};

// Distribution of a tensor's generated values. Tensors from files ignore it.
struct InitialValues {
  float mean = 0;
  float deviation = -1;  // if negative, default_values() of random_weights.cc apply

  static InitialValues constant(float value) { return {value, 0}; }
  static InitialValues of_fan_in(int64_t inputs);  // deviation is 1 / sqrt(inputs)
};

// The tensors of one mapped file. Throws Error{corrupt_file} with the file, the tensor and the
// bytes.
class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::string& path);
  // Parses `bytes` for tests and fuzzing. They must outlive the result.
  static SafetensorsFile parse(std::span<const std::byte> bytes, std::string_view name);

  const std::string& name() const { return name_; }
  const std::map<std::string, StoredTensor, std::less<>>& tensors() const { return tensors_; }

  // Returns null if the tensor is missing. Throws Error{unsupported} if its dtype is unsupported
  // (BOOL, F64, ...); other tensors of such a file remain readable.
  const StoredTensor* find(std::string_view tensor) const;
  bool contains(std::string_view tensor) const;  // true for any dtype
  // Throws Error{io} if the file was truncated after it was opened.
  void check_intact() const;

 private:
  std::string name_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> unsupported_;  // dtype by tensor
  std::shared_ptr<const MappedFile> mapping_;
};

class JsonObject;
class RandomWeights;
class ThreadPool;

// A checkpoint folder: model.safetensors, or the shards named by model.safetensors.index.json. A
// tensor comes from the shard that the index names, even if other shards contain the same name.
// Alternatively, a checkpoint generates tensors of any name and shape on request.
class Checkpoint {
 public:
  static Checkpoint open(const std::string& folder);
  // Generates random weights in the config's dtype (see RandomWeights). `folder` contains other
  // files of the model.
  static Checkpoint random(const std::string& folder, const JsonObject& config, uint64_t seed,
                           ThreadPool& threads);

  // Throws Error{corrupt_file}, with both shapes, if the tensor is missing or has another shape.
  const StoredTensor& tensor(std::string_view name, std::span<const int64_t> shape,
                             const InitialValues& random = {}) const;
  // Works as SafetensorsFile::find(). Random weights lack all optional tensors.
  const StoredTensor* find(std::string_view name) const;
  size_t bytes() const;  // total of all tensors in files
  const std::string& folder() const { return folder_; }
  // Says which files are read if there are several choices; otherwise empty.
  const std::string& note() const { return note_; }
  void check_intact() const;  // checks all files as SafetensorsFile::check_intact() does
  bool is_random() const { return random_ != nullptr; }

 private:
  void open_shards(const std::string& index);
  const SafetensorsFile* file_of(std::string_view tensor) const;  // null if no file has the tensor

  std::string folder_, note_;
  std::vector<SafetensorsFile> files_;
  CheckpointIndex index_;                  // its shards are files_; empty for a single file
  std::shared_ptr<RandomWeights> random_;  // replaces files
};

}  // namespace fovea
