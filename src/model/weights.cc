// SPDX-License-Identifier: Apache-2.0
#include "model/weights.h"

#include <fmt/core.h>

#include <limits>
#include <span>

#include "core/check.h"
#include "core/float_types.h"
#include "core/quote.h"

namespace fovea {
namespace {

int32_t checked_size(std::string_view name, int64_t size) {
  if (size > std::numeric_limits<int32_t>::max()) {
    fail(ErrorCode::unsupported, "{} has a dimension of {}, at most 2^31 - 1 are supported",
         quote(name), size);
  }
  return static_cast<int32_t>(size);
}

// Returns the matrix [n, k] without its weights.
Linear shape_of(std::string_view name, const StoredTensor& tensor, int64_t n, int64_t k) {
  Linear linear;
  linear.dtype = tensor.dtype;
  linear.n = checked_size(name, n);
  linear.k = checked_size(name, k);
  linear.stride = k;
  return linear;
}

}  // namespace

Weights Weights::operator[](std::string_view part) const {
  return Weights(*checkpoint_, *device_, fmt::format("{}{}.", prefix_, part));
}

Weights Weights::operator[](int64_t index) const { return (*this)[std::to_string(index)]; }

const StoredTensor& Weights::tensor(std::string_view name, std::initializer_list<int64_t> shape,
                                    const InitialValues& random) const {
  const std::string full_name = fmt::format("{}{}", prefix_, name);
  const StoredTensor& tensor =
      checkpoint_->tensor(full_name, std::span(shape.begin(), shape.end()), random);
  if (tensor.dtype != DType::f32 && tensor.dtype != DType::bf16 && tensor.dtype != DType::f16) {
    fail(ErrorCode::unsupported, "tensor {} is {}; weights may be fp32, bf16 or fp16",
         quote(full_name), dtype_name(tensor.dtype));
  }
  return tensor;
}

bool Weights::has(std::string_view name) const {
  return checkpoint_->find(fmt::format("{}{}", prefix_, name)) != nullptr;
}

const std::byte* Weights::matrix(std::string_view name,
                                 std::initializer_list<int64_t> shape) const {
  return placed(tensor(name, shape), name);
}

const std::byte* Weights::placed(const StoredTensor& tensor, std::string_view name) const {
  return device_->place(tensor, fmt::format("{}{}", prefix_, name));
}

const std::byte* Weights::located(const StoredTensor& tensor, std::string_view name) const {
  return device_->locate(tensor, fmt::format("{}{}", prefix_, name));
}

std::span<const float> Weights::vector(std::string_view name, std::initializer_list<int64_t> shape,
                                       const InitialValues& random, float factor) const {
  std::vector<float> values;
  append_floats(name, shape, random, values);
  for (float& value : values) value *= factor;
  return device_->place(std::move(values));
}

void Weights::append_floats(std::string_view name, std::initializer_list<int64_t> shape,
                            const InitialValues& random, std::vector<float>& values) const {
  const StoredTensor& stored = tensor(name, shape, random);
  std::vector<std::byte> made;
  const std::byte* data = stored.data;
  if (data == nullptr) {
    made.resize(stored.bytes);
    stored.read(0, made);
    data = made.data();
  }
  const auto count = static_cast<int64_t>(stored.bytes / dtype_bytes(stored.dtype));
  for (int64_t i = 0; i < count; ++i) values.push_back(load_float(data, stored.dtype, i));
}

Linear Weights::linear(std::string_view name, int64_t n, int64_t k, bool has_bias) const {
  const Weights own = (*this)[name];
  Linear linear = shape_of(name, own.tensor("weight", {n, k}), n, k);
  linear.weight = own.matrix("weight", {n, k});
  if (has_bias) linear.bias = own.vector("bias", {n}).data();
  return linear;
}

Linear Weights::located(std::string_view name, int64_t n, int64_t k, bool has_bias) const {
  const Weights own = (*this)[name];
  const StoredTensor& stored = own.tensor("weight", {n, k});
  Linear linear = shape_of(name, stored, n, k);
  linear.weight = own.located(stored, "weight");
  if (has_bias) linear.bias = own.vector("bias", {n}).data();
  return linear;
}

Linear Weights::joined(std::initializer_list<Part> parts, int64_t k, bool has_bias) const {
  std::vector<const StoredTensor*> tensors;
  std::vector<float> biases;
  std::string names;
  int64_t rows = 0;
  for (const Part& part : parts) {
    const Weights own = (*this)[part.name];
    tensors.push_back(&own.tensor("weight", {part.n, k}));
    if (has_bias) own.append_floats("bias", {part.n}, {}, biases);
    names += fmt::format("{}{}weight", names.empty() ? "" : ", ", own.prefix_);
    rows += part.n;
  }
  Linear linear;
  linear.weight = device_->place_joined(tensors, names);
  if (!linear) return linear;
  linear.dtype = tensors.front()->dtype;
  linear.n = checked_size(names, rows);
  linear.k = checked_size(names, k);
  linear.stride = k;
  if (has_bias) linear.bias = device_->place(std::move(biases)).data();
  return linear;
}

Linear Weights::stacked(std::string_view name, int64_t index, int64_t count, int64_t k,
                        int64_t n) const {
  const StoredTensor& stored = tensor(name, {count, k, n}, InitialValues::of_fan_in(k));
  Linear linear;
  linear.weight =
      located(stored, name) + index * k * n * static_cast<int64_t>(dtype_bytes(stored.dtype));
  linear.dtype = stored.dtype;
  linear.n = checked_size(name, n);
  linear.k = checked_size(name, k);
  linear.stride = n;
  linear.is_kn = true;
  return linear;
}

}  // namespace fovea
