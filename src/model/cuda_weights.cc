// SPDX-License-Identifier: Apache-2.0
#include "model/cuda_weights.h"

#include <algorithm>

#include "core/check.h"
#include "core/float_types.h"
#include "core/rounding.h"

namespace fovea {
namespace {

// Values that are generated, or gathered from a part of a matrix, are copied to the device in
// pieces of this size.
constexpr size_t kStagingBytes = size_t{64} << 20;

size_t aligned(size_t bytes) { return round_up(bytes, kCudaAlignment); }

}  // namespace

void CudaWeights::copy_in(std::byte* to, const StoredTensor& tensor) {
  if (tensor.data != nullptr) {
    gpu::copy_to_device(to, tensor.data, tensor.bytes, stream_);
    return;
  }
  for (size_t begin = 0; begin < tensor.bytes; begin += kStagingBytes) {
    const std::span piece = staging().first(std::min(kStagingBytes, tensor.bytes - begin));
    tensor.read(begin, piece);
    gpu::copy_to_device(to + begin, piece.data(), piece.size(), stream_);
    gpu::synchronize(stream_);
  }
}

std::span<std::byte> CudaWeights::staging() {
  if (staging_.bytes() == 0) staging_ = gpu::PinnedBuffer(kStagingBytes);
  return {staging_.data<std::byte>(), kStagingBytes};
}

const std::byte* CudaWeights::place_joined(std::span<const StoredTensor* const> tensors,
                                           std::string_view name) {
  size_t bytes = 0;
  for (const StoredTensor* tensor : tensors) {
    check_cuda_matrix(*tensor, name);
    bytes += tensor->bytes;
  }
  gpu::DeviceBuffer buffer(bytes);
  auto* to = buffer.data<std::byte>();
  for (const StoredTensor* tensor : tensors) {
    copy_in(to, *tensor);
    to += tensor->bytes;
  }
  gpu::synchronize(stream_);
  matrix_bytes_ += bytes;
  return joined_.emplace_back(std::move(buffer)).data<std::byte>();
}

const std::byte* CudaWeights::place(const StoredTensor& tensor, std::string_view name) {
  check_cuda_matrix(tensor, name);
  gpu::DeviceBuffer& buffer =
      matrices_[tensor.data != nullptr ? static_cast<const void*>(tensor.data) : &tensor];
  if (buffer.bytes() == 0) {
    buffer = gpu::DeviceBuffer(tensor.bytes);
    copy_in(buffer.data<std::byte>(), tensor);
    gpu::synchronize(stream_);
    matrix_bytes_ += tensor.bytes;
  }
  return buffer.data<std::byte>();
}

const std::byte* CudaWeights::locate(const StoredTensor& tensor, std::string_view name) {
  check_cuda_matrix(tensor, name);
  return located_.locate(tensor);
}

Linear CudaWeights::place_parts(std::span<const Linear> parts) {
  Linear placed = parts[0];
  size_t bytes = 0;
  std::vector<float> biases;
  placed.n = 0;
  for (const Linear& part : parts) {
    bytes += static_cast<size_t>(LocatedTensors::rows_of(part)) * LocatedTensors::row_bytes(part);
    placed.n += part.n;
    if (part.bias == nullptr) continue;
    const std::vector<float> own = read({part.bias, static_cast<size_t>(part.n)});
    biases.insert(biases.end(), own.begin(), own.end());
  }
  placed.stride = placed.is_kn ? placed.n : placed.k;
  if (!biases.empty()) placed.bias = place(std::move(biases)).data();
  gpu::DeviceBuffer& buffer = joined_.emplace_back(std::max(bytes, kCudaAlignment));
  matrix_bytes_ += bytes;
  placed.weight = buffer.data<std::byte>();
  std::byte* to = buffer.data<std::byte>();
  for (const Linear& part : parts) {
    copy_part(to, part);
    to += static_cast<size_t>(LocatedTensors::rows_of(part)) * LocatedTensors::row_bytes(part);
  }
  return placed;
}

void CudaWeights::copy_part(std::byte* to, const Linear& part) {
  const size_t width = LocatedTensors::row_bytes(part);
  const int64_t rows = LocatedTensors::rows_of(part);
  if (width == 0) return;
  const auto at_once = static_cast<int64_t>(kStagingBytes / width);
  check_argument(at_once > 0, "a row has {} bytes, at most {} are copied", width, kStagingBytes);
  for (int64_t row = 0; row < rows; row += at_once) {
    const auto count = static_cast<size_t>(std::min(at_once, rows - row));
    const std::span piece = staging().first(count * width);
    located_.read_rows(part, row, piece);
    gpu::copy_to_device(to, piece.data(), piece.size(), stream_);
    gpu::synchronize(stream_);
    to += piece.size();
  }
}

std::vector<float> CudaWeights::read(std::span<const float> placed) const {
  std::vector<float> values(placed.size());
  gpu::copy_to_host(values.data(), placed.data(), placed.size_bytes(), stream_);
  gpu::synchronize(stream_);
  return values;
}

std::span<const float> CudaWeights::place(std::vector<float> values) {
  std::vector<uint16_t> rounded(values.size());
  std::ranges::transform(values, rounded.begin(), float_to_bf16);
  const size_t bytes = values.size() * sizeof(float);
  std::byte* const memory = vectors_.take(cuda_vector_bytes(values.size()));
  gpu::copy_to_device(memory, values.data(), bytes, stream_);
  gpu::copy_to_device(memory + aligned(bytes), rounded.data(), rounded.size() * sizeof(uint16_t),
                      stream_);
  gpu::synchronize(stream_);
  return {reinterpret_cast<const float*>(memory), values.size()};
}

const int32_t* CudaWeights::place_ints(std::vector<int32_t> values) {
  const size_t bytes = values.size() * sizeof(int32_t);
  std::byte* const memory = vectors_.take(bytes);
  gpu::copy_to_device(memory, values.data(), bytes, stream_);
  gpu::synchronize(stream_);
  return reinterpret_cast<const int32_t*>(memory);
}

}  // namespace fovea
