// SPDX-License-Identifier: Apache-2.0
// Addresses that stand for the tensors of a checkpoint until a part of each is placed on a device.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "model/device.h"

namespace fovea {

class LocatedTensors {
 public:
  // Returns the first of tensor.bytes addresses that no other tensor has: those of the mapped file
  // or, for generated values, reserved ones that nobody can read. The tensor must outlive this.
  const std::byte* locate(const StoredTensor& tensor);

  // A row of `part` lies in the file as one run of elements: of its outputs if part.is_kn, else of
  // its inputs. Reads rows [first, first + out.size() / bytes of a row). The part must lie in one
  // located tensor; otherwise throws Error{invalid_argument}.
  void read_rows(const Linear& part, int64_t first, std::span<std::byte> out) const;

  static int64_t rows_of(const Linear& part) { return part.is_kn ? part.k : part.n; }
  static size_t row_bytes(const Linear& part) {
    return static_cast<size_t>(part.is_kn ? part.n : part.k) * dtype_bytes(part.dtype);
  }

 private:
  struct Found {
    const StoredTensor* tensor = nullptr;
    size_t offset = 0;
  };
  Found find(const Linear& part) const;

  std::map<const std::byte*, const StoredTensor*> tensors_;   // by address
  std::map<const StoredTensor*, const std::byte*> reserved_;  // for generated values
  std::vector<std::unique_ptr<std::byte, std::function<void(std::byte*)>>> ranges_;
};

}  // namespace fovea
