// SPDX-License-Identifier: Apache-2.0
#include "c/tensors.h"

#include <algorithm>
#include <string>

#include "c/arguments.h"

namespace fovea::c {
namespace {

// Extents stay far below the range of 64 bits, offsets below the size of an address space.
constexpr int64_t kMaxExtent = int64_t{1} << 48;
constexpr uint64_t kMaxOffset = uint64_t{1} << 46;

// The address of tensors without elements. It is never read.
alignas(64) char no_elements[64];

std::string shape_text(const TensorView& view, int32_t ndim) {
  std::string text = "[";
  for (int32_t i = 0; i < ndim; ++i) text += fmt::format("{}{}", i > 0 ? ", " : "", view.shape[i]);
  return text + "]";
}

std::string wanted_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    const std::string extent = shape[i] == kAnyExtent ? "any" : fmt::format("{}", shape[i]);
    text += fmt::format("{}{}{}", i > 0 ? ", " : "", extent,
                        i == 0 && shape[i] != kAnyExtent ? " or more" : "");
  }
  return text + "]";
}

void check_shape(const TensorView& view, std::string_view name, std::span<const int64_t> wanted) {
  bool fits = wanted[0] == kAnyExtent || view.shape[0] >= wanted[0];
  for (size_t i = 1; i < wanted.size(); ++i) {
    fits = fits && (wanted[i] == kAnyExtent || view.shape[i] == wanted[i]);
  }
  if (fits) return;
  refuse("{} has the shape {}, must be {}", name,
         shape_text(view, static_cast<int32_t>(wanted.size())), wanted_text(wanted));
}

void check_device(const DLTensor& tensor, TensorName argument) {
  const DLDevice device = tensor.device;
  const auto type = static_cast<int32_t>(device.device_type);
  const bool fits = argument.device.kind == DeviceKind::cpu
                        ? type == kDLCPU || type == kDLCUDAHost
                        : (type == kDLCUDA && device.device_id == argument.device.index) ||
                              type == kDLCUDAManaged;
  if (fits) return;
  refuse("{} is on device_type {}, device_id {}, must be on {}", argument.name, type,
         device.device_id, device_name(argument.device));
}

void check_address(const DLTensor& tensor, const TensorView& view, std::string_view name) {
  check(view.elements == 0 || tensor.data != nullptr, "{}: data is null", name);
  check(tensor.byte_offset <= kMaxOffset, "{}: byte_offset is {}, at most {}", name,
        tensor.byte_offset, kMaxOffset);
  const auto bytes = static_cast<uintptr_t>((tensor.dtype.bits + 7) / 8);
  if (view.elements == 0 || bytes == 0) return;
  check(reinterpret_cast<uintptr_t>(view.data) % bytes == 0,
        "{} is at {} (byte_offset {}), must be aligned to {} bytes", name,
        static_cast<const void*>(view.data), tensor.byte_offset, bytes);
}

}  // namespace

TensorView view_tensor(const DLTensor& tensor, TensorName argument, int32_t ndim,
                       std::string_view dimensions) {
  const std::string_view name = argument.name;
  check_alignment(&tensor, alignof(DLTensor), name);
  check(tensor.ndim == ndim, "{} has {} dimensions, must have {}: {}", name, tensor.ndim, ndim,
        dimensions);
  check(tensor.shape != nullptr, "{}: shape is null", name);
  check_device(tensor, argument);
  check(tensor.dtype.lanes == 1, "{}: dtype.lanes is {}, must be 1", name, tensor.dtype.lanes);
  TensorView view;
  view.elements = 1;
  for (int32_t i = ndim - 1; i >= 0; --i) {
    const int64_t extent = tensor.shape[i];
    check(extent >= 0 && extent <= kMaxExtent, "{}: shape[{}] is {}, must be in [0, {}]", name, i,
          extent, kMaxExtent);
    view.shape[i] = extent;
    view.strides[i] = tensor.strides == nullptr || extent <= 1 ? view.elements : tensor.strides[i];
    check(extent == 0 || view.elements <= kMaxExtent / extent, "{} has more than {} elements", name,
          kMaxExtent);
    // An empty dimension counts as 1 for the strides of the others.
    view.elements *= std::max<int64_t>(extent, 1);
  }
  for (int32_t i = 0; i < ndim; ++i) view.elements *= view.shape[i] == 0 ? 0 : 1;
  view.data = tensor.data == nullptr
                  ? no_elements
                  : reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(tensor.data) +
                                            static_cast<uintptr_t>(tensor.byte_offset));
  check_address(tensor, view, name);
  return view;
}

void check_type(const DLTensor& tensor, std::string_view name, ElementType type) {
  // Masks may be bool.
  const bool is_bool = type.code == kDLUInt && type.bits == 8 && tensor.dtype.code == kDLBool;
  check((tensor.dtype.code == type.code || is_bool) && tensor.dtype.bits == type.bits,
        "{}: dtype is (code {}, {} bits), must be {} (code {}, {} bits)", name, tensor.dtype.code,
        tensor.dtype.bits, type.name, type.code, type.bits);
}

void check_dense(const TensorView& view, std::string_view name, int32_t first, int32_t ndim) {
  if (view.elements == 0) return;
  int64_t dense = 1;
  for (int32_t i = ndim - 1; i >= first; --i) {
    check(view.shape[i] <= 1 || view.strides[i] == dense,
          "{}: strides[{}] is {}, must be {}: this part is dense", name, i, view.strides[i], dense);
    dense *= view.shape[i];
  }
}

DType dtype_of(const DLTensor& tensor, std::string_view name) {
  constexpr DType kAll[] = {DType::f32,    DType::f16, DType::bf16, DType::f8e4m3,
                            DType::f8e5m2, DType::i32, DType::i64,  DType::u8};
  for (const DType dtype : kAll) {
    const DLDataType type = dl_type(dtype);
    if (type.code == tensor.dtype.code && type.bits == tensor.dtype.bits) return dtype;
  }
  refuse("{}: dtype is (code {}, {} bits), which Fovea does not have", name, tensor.dtype.code,
         tensor.dtype.bits);
}

DLDataType dl_type(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * dtype_bytes(dtype));
  switch (dtype) {
    case DType::f32:
    case DType::f16:
      return {kDLFloat, bits, 1};
    case DType::bf16:
      return {kDLBfloat, bits, 1};
    case DType::f8e4m3:
      return {kDLFloat8_e4m3fn, bits, 1};
    case DType::f8e5m2:
      return {kDLFloat8_e5m2, bits, 1};
    case DType::i32:
    case DType::i64:
      return {kDLInt, bits, 1};
    case DType::u8:
      return {kDLUInt, bits, 1};
  }
  return {kDLOpaqueHandle, 0, 1};
}

DLDevice dl_device(Device device) {
  if (device.kind == DeviceKind::cpu) return {kDLCPU, 0};
  return {kDLCUDA, device.index};
}

HeadRows head_rows(const DLTensor* tensor, TensorName argument, RowsShape shape) {
  if (tensor == nullptr) return {};
  const TensorView view = view_tensor(*tensor, argument, 3, "[tokens, heads, dim]");
  const int64_t wanted[] = {shape.tokens, shape.heads, shape.dim};
  const DType dtype = dtype_of(*tensor, argument.name);
  check_shape(view, argument.name, wanted);
  check_dense(view, argument.name, 2, 3);
  return {view.data, dtype, view.strides[0], view.strides[1]};
}

const float* dense_floats(const DLTensor* tensor, TensorName argument,
                          std::span<const int64_t> shape) {
  if (tensor == nullptr) return nullptr;
  const auto ndim = static_cast<int32_t>(shape.size());
  const TensorView view = view_tensor(*tensor, argument, ndim, "a dense array");
  check_type(*tensor, argument.name, element_type<float>());
  check_shape(view, argument.name, shape);
  check_dense(view, argument.name, 0, ndim);
  return reinterpret_cast<const float*>(view.data);
}

template <typename T>
std::span<const T> dense_array(const DLTensor* tensor, TensorName argument) {
  if (tensor == nullptr) return {};
  const TensorView view = view_tensor(*tensor, argument, 1, "a dense array");
  check_type(*tensor, argument.name, element_type<T>());
  check_dense(view, argument.name, 0, 1);
  return {reinterpret_cast<const T*>(view.data), static_cast<size_t>(view.elements)};
}

template std::span<const int32_t> dense_array(const DLTensor*, TensorName);
template std::span<const int64_t> dense_array(const DLTensor*, TensorName);
template std::span<const uint8_t> dense_array(const DLTensor*, TensorName);
template std::span<const uint32_t> dense_array(const DLTensor*, TensorName);
template std::span<const uint64_t> dense_array(const DLTensor*, TensorName);

}  // namespace fovea::c
