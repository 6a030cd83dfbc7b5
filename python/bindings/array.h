// SPDX-License-Identifier: Apache-2.0
// Arrays of other libraries, read through DLPack without a copy.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/device.h"
#include "fovea/dtype.h"
#include "python/bindings/dlpack.h"

namespace fovea::python {

namespace nb = nanobind;

// The DLPack number of a stream for `__dlpack__`: the producer makes the array ready there.
// kNoSync: the caller orders the work.
constexpr int64_t kNoSync = -1;

// Owns what `__dlpack__` returned: it keeps the memory of the array.
class ManagedTensor {
 public:
  ManagedTensor() = default;
  explicit ManagedTensor(DlManagedTensor* tensor) : plain_(tensor) {}
  explicit ManagedTensor(DlManagedTensorVersioned* tensor) : versioned_(tensor) {}
  ManagedTensor(ManagedTensor&& other) noexcept { *this = std::move(other); }
  ManagedTensor& operator=(ManagedTensor&& other) noexcept {
    std::swap(plain_, other.plain_);
    std::swap(versioned_, other.versioned_);
    return *this;
  }
  ~ManagedTensor();

  explicit operator bool() const { return plain_ != nullptr || versioned_ != nullptr; }

 private:
  DlManagedTensor* plain_ = nullptr;
  DlManagedTensorVersioned* versioned_ = nullptr;
};

// A view of one array. The object that it was made of must outlive it, and so must `name`.
class Array {
 public:
  static constexpr int32_t kMaxDimensions = 5;

  // Throws Error{invalid_argument} that begins with `name` if the object is no array.
  Array(nb::handle source, const char* name, int64_t stream = kNoSync);

  const char* name() const { return name_; }
  char* data() const { return data_; }
  DlDevice device() const { return device_; }
  DlType dtype() const { return dtype_; }
  int32_t dimensions() const { return dimensions_; }
  int64_t extent(int32_t axis) const { return shape_[axis]; }
  // The distance of neighbours in elements. Axes of at most one element have a stride of 0.
  int64_t stride(int32_t axis) const { return strides_[axis]; }
  int64_t elements() const;
  int64_t bytes() const { return elements() * dtype_.bits / 8; }
  bool is_dense() const;
  // Null: the array's library cannot tell its stream.
  const DlExchangeApi* exchange_api() const { return api_; }

  // Throw Error{invalid_argument} naming the array, its property and the one that it must have.
  void check_dimensions(int32_t dimensions, const char* shape) const;
  void check_extent(int32_t axis, int64_t extent, const char* shape) const;
  void check_dtype(DType dtype) const;  // unsigned integers of the width stand for bf16, fp16, fp8
  void check_device(Device device) const;
  void check_host() const;
  void check_writable() const;
  void check_last_axis() const;  // neighbours are contiguous
  void check_dense() const;
  std::string shape_text() const;

  // Moves the owner of the memory, if the array's library gave one, out of the view.
  ManagedTensor take_managed() { return std::move(managed_); }

 private:
  void read(const DlTensor& tensor);
  void read_capsule(nb::handle source, int64_t stream);

  const char* name_;
  char* data_ = nullptr;
  DlDevice device_ = {};
  DlType dtype_ = {};
  int32_t dimensions_ = 0;
  bool read_only_ = false;
  std::array<int64_t, kMaxDimensions> shape_ = {}, strides_ = {};
  const DlExchangeApi* api_ = nullptr;
  ManagedTensor managed_;
};

// Keeps the memory of arrays as long as pointers into them are used.
class Keeper {
 public:
  Keeper() = default;
  Keeper(Keeper&&) noexcept = default;
  Keeper& operator=(Keeper&&) noexcept = default;

  void keep(Array& array) {
    if (ManagedTensor managed = array.take_managed()) managed_.push_back(std::move(managed));
  }
  void keep(nb::handle object) { objects_.push_back(nb::borrow(object)); }

 private:
  std::vector<nb::object> objects_;
  std::vector<ManagedTensor> managed_;
};

bool is_given(nb::handle object);  // neither absent nor None

// Returns the name of a dtype as error messages write it: "bf16", "uint16".
std::string dtype_text(DlType dtype);
DlType dl_type(DType dtype);
DlDevice dl_device(Device device);
// Returns the device whose backends take the array: host memory that is pinned counts as the CPU's.
Device device_of(DlDevice device);

// Copies integers out of an array or a sequence. Throws Error{invalid_argument} naming an element
// that is no integer or out of range.
template <typename Integer>
std::vector<Integer> integers_of(nb::handle source, const char* name);

}  // namespace fovea::python
