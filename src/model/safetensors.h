// SPDX-License-Identifier: Apache-2.0
// Reads the safetensors format (https://huggingface.co/docs/safetensors) without trusting it:
// sizes, shapes, offsets, overlaps and gaps are checked before a tensor can be seen. Files are
// memory-mapped, never copied.
#pragma once

#include <cstddef>
#include <cstdint>
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
  const std::byte* data = nullptr;  // into the mapping, aligned to 1
  size_t bytes = 0;
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

// A checkpoint folder: model.safetensors, or else the shards named by model.safetensors.index.json.
// A tensor is that of the shard the index names, whatever other shards hold under its name.
class Checkpoint {
 public:
  static Checkpoint open(const std::string& folder);

  // Error{corrupt_file} when missing or of another shape; the message names both shapes.
  const StoredTensor& tensor(std::string_view name, std::span<const int64_t> shape) const;
  const StoredTensor* find(std::string_view name) const;  // as SafetensorsFile::find
  size_t bytes() const;                                   // of all tensors
  const std::string& folder() const { return folder_; }
  // A line that says which files are read where there are several choices; else empty.
  const std::string& note() const { return note_; }
  void check_intact() const;  // all files, as SafetensorsFile::check_intact

 private:
  void open_shards(const std::string& index);
  const SafetensorsFile* file_of(std::string_view tensor) const;  // null where none has it

  std::string folder_, note_;
  std::vector<SafetensorsFile> files_;
  CheckpointIndex index_;  // its shards are files_; empty: one file
};

}  // namespace fovea
