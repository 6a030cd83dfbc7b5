// SPDX-License-Identifier: Apache-2.0
// What transformers computed from the checkpoints of testdata/models.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "model/safetensors.h"

namespace fovea {

inline std::string model_folder(const std::string& model) {
  return FOVEA_SOURCE_DIR "/testdata/models/" + model;
}

inline SafetensorsFile reference_file(const std::string& model) {
  return SafetensorsFile::open(model_folder(model) + "/reference.safetensors");
}

// Empty when there is no such tensor.
template <typename T>
std::vector<T> values_of(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor* tensor = file.find(name);
  if (tensor == nullptr) return {};
  std::vector<T> values(tensor->bytes / sizeof(T));
  std::memcpy(values.data(), tensor->data, tensor->bytes);
  return values;
}

}  // namespace fovea
