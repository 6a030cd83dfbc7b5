// SPDX-License-Identifier: Apache-2.0
#include "model/located_tensors.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

#include "core/check.h"

namespace fovea {

const std::byte* LocatedTensors::locate(const StoredTensor& tensor) {
  if (tensor.data != nullptr) {
    tensors_[tensor.data] = &tensor;
    return tensor.data;
  }
  const std::byte*& found = reserved_[&tensor];
  if (found != nullptr) return found;
  const size_t bytes = std::max<size_t>(tensor.bytes, 1);
  void* const range =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    fail(ErrorCode::out_of_memory, "no room for {} addresses of a tensor", bytes);
  }
  ranges_.emplace_back(static_cast<std::byte*>(range),
                       [bytes](std::byte* begin) { munmap(begin, bytes); });
  found = ranges_.back().get();
  tensors_[found] = &tensor;
  return found;
}

LocatedTensors::Found LocatedTensors::find(const Linear& part) const {
  auto next = tensors_.upper_bound(part.weight);
  check_argument(next != tensors_.begin(), "a matrix of {} x {} is in no located tensor", part.n,
                 part.k);
  const auto& [begin, tensor] = *std::prev(next);
  const auto offset = static_cast<size_t>(part.weight - begin);
  const auto rows = static_cast<size_t>(rows_of(part));
  const size_t pitch = static_cast<size_t>(part.stride) * dtype_bytes(part.dtype);
  const size_t extent = rows == 0 ? 0 : (rows - 1) * pitch + row_bytes(part);
  check_argument(offset <= tensor->bytes && extent <= tensor->bytes - offset,
                 "a matrix of {} x {} ends outside its tensor", part.n, part.k);
  return {tensor, offset};
}

void LocatedTensors::read_rows(const Linear& part, int64_t first, std::span<std::byte> out) const {
  const Found found = find(part);
  const size_t width = row_bytes(part);
  if (width == 0) return;
  const size_t pitch = static_cast<size_t>(part.stride) * dtype_bytes(part.dtype);
  const size_t begin = found.offset + static_cast<size_t>(first) * pitch;
  if (pitch == width) return found.tensor->read(begin, out);
  for (size_t row = 0; row < out.size() / width; ++row) {
    found.tensor->read(begin + row * pitch, out.subspan(row * width, width));
  }
}

}  // namespace fovea
