// SPDX-License-Identifier: Apache-2.0
// Outputs of transformers for the checkpoints of testdata/models and testdata/goldens.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "model/safetensors.h"
#include "support/golden_model.h"

namespace fovea {

inline bool is_golden(const std::string& model) {
  return std::filesystem::exists(golden_source(model));
}

inline std::string model_folder(const std::string& model) {
  if (is_golden(model)) return golden_folder(model);
  return FOVEA_SOURCE_DIR "/testdata/models/" + model;
}

inline SafetensorsFile reference_file(const std::string& model) {
  const std::string folder = is_golden(model) ? golden_source(model).string() : model_folder(model);
  return SafetensorsFile::open(folder + "/reference.safetensors");
}

// Empty if the tensor does not exist.
template <typename T>
std::vector<T> values_of(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor* tensor = file.find(name);
  if (tensor == nullptr) return {};
  std::vector<T> values(tensor->bytes / sizeof(T));
  std::memcpy(values.data(), tensor->data, tensor->bytes);
  return values;
}

}  // namespace fovea
