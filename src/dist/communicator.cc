// SPDX-License-Identifier: Apache-2.0
// Checks of arguments that all communicators have in common.
#include "fovea/communicator.h"

#include "core/check.h"
#include "core/checked_math.h"

namespace fovea {
namespace {

uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  return address(a) < address(b) + b_bytes && address(b) < address(a) + a_bytes;
}

const char* part_of(const void* parts, int rank, size_t bytes) {
  return static_cast<const char*>(parts) + static_cast<size_t>(rank) * bytes;
}

void check_buffer(const void* data, size_t bytes, std::string_view name) {
  check_argument(data != nullptr || bytes == 0, "{} is null, must hold {} bytes", name, bytes);
}

size_t bytes_of_all(size_t bytes, int ranks) {
  return static_cast<size_t>(
      checked_product("size() * bytes", {static_cast<int64_t>(bytes), int64_t{ranks}}));
}

}  // namespace

Communicator::Communicator(int rank, int size) : rank_(rank), size_(size) {
  check_argument(size > 0, "size is {}, must be positive", size);
  check_argument(rank >= 0 && rank < size, "rank is {}, must be in [0, {})", rank, size);
}

void Communicator::check_stream(Stream stream) const {
  check_argument(device() == DeviceKind::cuda || stream == nullptr,
                 "stream is {}, must be null: {} runs on the CPU", static_cast<void*>(stream),
                 name());
}

void Communicator::check_reduction(const Reduction& call, size_t send_parts) const {
  check_argument(call.count >= 0, "count is {}, must not be negative", call.count);
  check_enum(call.dtype, DType::u8, "dtype", "DType");
  check_argument((is_floating(call.dtype) && !is_fp8(call.dtype)) || call.dtype == DType::i32 ||
                     call.dtype == DType::i64,
                 "dtype is {}, accepted: fp32, fp16, bf16, int32, int64", dtype_name(call.dtype));
  check_enum(call.op, ReduceOp::max, "op", "ReduceOp");
  const auto element = static_cast<int64_t>(dtype_bytes(call.dtype));
  const auto bytes = static_cast<size_t>(
      checked_product("count", {call.count, element, static_cast<int64_t>(send_parts)}));
  check_buffer(call.send, bytes, "send");
  check_buffer(call.receive, bytes, "receive");
}

void Communicator::all_reduce(const void* send, void* receive, int64_t count, DType dtype,
                              ReduceOp op, Stream stream) {
  const Reduction call{send, receive, count, dtype, op};
  check_stream(stream);
  check_reduction(call, 1);
  const size_t bytes = static_cast<size_t>(count) * dtype_bytes(dtype);
  check_argument(send == receive || !overlap(send, bytes, receive, bytes),
                 "send and receive overlap, they may only be the same");
  run_all_reduce(call, stream);
}

void Communicator::reduce_scatter(const void* send, void* receive, int64_t count, DType dtype,
                                  ReduceOp op, Stream stream) {
  const Reduction call{send, receive, count, dtype, op};
  check_stream(stream);
  check_reduction(call, static_cast<size_t>(size_));
  const size_t bytes = static_cast<size_t>(count) * dtype_bytes(dtype);
  check_argument(receive == part_of(send, rank_, bytes) ||
                     !overlap(send, bytes * static_cast<size_t>(size_), receive, bytes),
                 "send and receive overlap, receive may only be part {} of send", rank_);
  run_reduce_scatter(call, stream);
}

void Communicator::all_gather(const void* send, void* receive, size_t bytes, Stream stream) {
  check_stream(stream);
  const size_t all = bytes_of_all(bytes, size_);
  check_buffer(send, bytes, "send");
  check_buffer(receive, all, "receive");
  check_argument(send == part_of(receive, rank_, bytes) || !overlap(send, bytes, receive, all),
                 "send and receive overlap, send may only be part {} of receive", rank_);
  run_all_gather({send, receive, bytes}, stream);
}

void Communicator::all_to_all(const void* send, void* receive, size_t bytes, Stream stream) {
  check_stream(stream);
  const size_t all = bytes_of_all(bytes, size_);
  check_buffer(send, all, "send");
  check_buffer(receive, all, "receive");
  check_argument(!overlap(send, all, receive, all), "send and receive overlap");
  run_all_to_all({send, receive, bytes}, stream);
}

void Communicator::broadcast(void* data, size_t bytes, int root, Stream stream) {
  check_stream(stream);
  check_argument(root >= 0 && root < size_, "root is {}, must be in [0, {})", root, size_);
  check_buffer(data, bytes, "data");
  run_broadcast(data, bytes, root, stream);
}

void Communicator::barrier(Stream stream) {
  check_stream(stream);
  run_barrier(stream);
}

}  // namespace fovea
