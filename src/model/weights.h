// SPDX-License-Identifier: Apache-2.0
// Tensors of a checkpoint, checked against the shapes an architecture expects and bound for use.
// Matrices stay where the file is mapped; vectors (norms, biases, sinks) become f32 copies.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/thread_pool.h"
#include "model/safetensors.h"

namespace fovea {

// Rows of f32 activations, `stride` elements apart.
struct Rows {
  float* data = nullptr;
  int64_t stride = 0;
};

// y = x W^T + b. The matrix belongs to the checkpoint.
struct Linear {
  const std::byte* weight = nullptr;  // [n, k], or [k, n] when is_kn
  DType dtype = DType::f32;
  int32_t n = 0, k = 0;
  int64_t stride = 0;  // elements between rows of the matrix
  bool is_kn = false;
  std::vector<float> bias;  // [n] or empty

  explicit operator bool() const { return weight != nullptr; }
  // out [rows, n] = x [rows, k] W^T + b
  void apply(Rows x, Rows out, int64_t rows, ThreadPool& threads) const;
};

// The tensors whose names start with a prefix. Every accessor throws Error{corrupt_file} where the
// tensor is missing or has another shape, Error{unsupported} where its dtype is not f32, bf16, f16.
class Weights {
 public:
  explicit Weights(const Checkpoint& checkpoint, std::string prefix = "")
      : checkpoint_(&checkpoint), prefix_(std::move(prefix)) {}

  Weights operator[](std::string_view part) const;  // "mlp": tensors under "mlp."
  Weights operator[](int64_t index) const;

  const StoredTensor& tensor(std::string_view name, std::initializer_list<int64_t> shape) const;
  std::vector<float> vector(std::string_view name, std::initializer_list<int64_t> shape) const;

  // NAME.weight [n, k] and, with `has_bias`, NAME.bias [n].
  Linear linear(std::string_view name, int64_t n, int64_t k, bool has_bias = false) const;
  // Matrix `index` of a stack NAME [count, k, n], input dimension first.
  Linear stacked(std::string_view name, int64_t index, int64_t count, int64_t k, int64_t n) const;

 private:
  const Checkpoint* checkpoint_;
  std::string prefix_;
};

}  // namespace fovea
