// SPDX-License-Identifier: Apache-2.0
// Tensors of a checkpoint, checked against expected shapes and placed on the model's device.
// Vectors (norms, biases, sinks) become f32 copies.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/device.h"
#include "model/safetensors.h"

namespace fovea {

// The tensors whose names start with a prefix. Accessors throw Error{corrupt_file} if the tensor is
// missing or has another shape, and Error{unsupported} if its dtype is not f32, bf16 or f16.
class Weights {
 public:
  Weights(const Checkpoint& checkpoint, ModelDevice& device, std::string prefix = "")
      : checkpoint_(&checkpoint), device_(&device), prefix_(std::move(prefix)) {}

  Weights operator[](std::string_view part) const;  // "mlp" gives the tensors under "mlp."
  Weights operator[](int64_t index) const;

  // Returns true if a file has the tensor.
  bool has(std::string_view name) const;
  // Returns the tensor of the file, or one with random values of the distribution `random`.
  const StoredTensor& tensor(std::string_view name, std::initializer_list<int64_t> shape,
                             const InitialValues& random = {}) const;
  // Returns the matrix on the device.
  const std::byte* matrix(std::string_view name, std::initializer_list<int64_t> shape) const;
  // Returns all values times `factor`.
  std::span<const float> vector(std::string_view name, std::initializer_list<int64_t> shape,
                                const InitialValues& random = {}, float factor = 1) const;

  // Reads NAME.weight [n, k] and, if `has_bias`, NAME.bias [n].
  Linear linear(std::string_view name, int64_t n, int64_t k, bool has_bias = false) const;
  // Does the same for a matrix of which ranks keep a part: see ModelDevice::locate().
  Linear located(std::string_view name, int64_t n, int64_t k, bool has_bias = false) const;
  // Reads several NAME.weight [n, k] as one matrix of all their rows in this order. Returns an
  // empty one if the device does not benefit from it.
  struct Part {
    std::string_view name;
    int64_t n = 0;
  };
  Linear joined(std::initializer_list<Part> parts, int64_t k, bool has_bias = false) const;
  // Locates matrix `index` of a stack NAME [count, k, n], whose input dimension comes first.
  Linear stacked(std::string_view name, int64_t index, int64_t count, int64_t k, int64_t n) const;

  ModelDevice& device() const { return *device_; }

 private:
  void append_floats(std::string_view name, std::initializer_list<int64_t> shape,
                     const InitialValues& random, std::vector<float>& values) const;
  const std::byte* placed(const StoredTensor& tensor, std::string_view name) const;
  const std::byte* located(const StoredTensor& tensor, std::string_view name) const;

  const Checkpoint* checkpoint_;
  ModelDevice* device_;
  std::string prefix_;
};

}  // namespace fovea
