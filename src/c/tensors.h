// SPDX-License-Identifier: Apache-2.0
// Makes views of the library from DLTensors. All functions throw Error{invalid_argument} naming the
// argument, its value and the limit. A null tensor gives an absent view.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include "c/status.h"
#include "fovea/device.h"
#include "fovea/dlpack_abi.h"
#include "fovea/dtype.h"
#include "fovea/tensor.h"

namespace fovea::c {

// An argument: its name in messages, and the device whose memory it must be.
struct TensorName {
  std::string_view name;
  Device device = {};
};

// A type of elements in DLPack, and its name in messages.
struct ElementType {
  uint8_t code;
  uint8_t bits;
  const char* name;
};
template <typename T>
constexpr ElementType element_type() {
  constexpr auto bits = static_cast<uint8_t>(8 * sizeof(T));
  if constexpr (std::is_same_v<T, float>) return {kDLFloat, bits, "fp32"};
  if constexpr (std::is_same_v<T, int32_t>) return {kDLInt, bits, "int32"};
  if constexpr (std::is_same_v<T, int64_t>) return {kDLInt, bits, "int64"};
  if constexpr (std::is_same_v<T, uint8_t>) return {kDLUInt, bits, "uint8"};
  if constexpr (std::is_same_v<T, uint16_t>) return {kDLUInt, bits, "uint16"};
  if constexpr (std::is_same_v<T, uint32_t>) return {kDLUInt, bits, "uint32"};
  if constexpr (std::is_same_v<T, uint64_t>) return {kDLUInt, bits, "uint64"};
}

DType dtype_of(const DLTensor& tensor, std::string_view name);
DLDataType dl_type(DType dtype);
DLDevice dl_device(Device device);

// Limit of an extent that may have any value.
inline constexpr int64_t kAnyExtent = -1;
// Shape [tokens or more, heads, dim].
struct RowsShape {
  int64_t tokens, heads, dim;
};
HeadRows head_rows(const DLTensor* tensor, TensorName argument, RowsShape shape);

// A checked tensor: the address of its first element, shape and strides in elements. Dimensions of
// extent 1 have the stride of a dense array.
struct TensorView {
  static constexpr int32_t kMaxDimensions = 4;
  char* data = nullptr;
  int64_t shape[kMaxDimensions] = {};
  int64_t strides[kMaxDimensions] = {};
  int64_t elements = 0;
};
// Checks everything but dtype and shape. `dimensions` describes the shape in messages: "[tokens,
// heads, dim]".
TensorView view_tensor(const DLTensor& tensor, TensorName argument, int32_t ndim,
                       std::string_view dimensions);
void check_type(const DLTensor& tensor, std::string_view name, ElementType type);
void check_dense(const TensorView& view, std::string_view name, int32_t first, int32_t ndim);

// A dense array of f32. The first extent may be larger; kAnyExtent stands for any.
const float* dense_floats(const DLTensor* tensor, TensorName argument,
                          std::span<const int64_t> shape);

// A dense array of one dimension.
template <typename T>
std::span<const T> dense_array(const DLTensor* tensor, TensorName argument);

}  // namespace fovea::c
