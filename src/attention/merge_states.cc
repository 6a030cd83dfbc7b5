// SPDX-License-Identifier: Apache-2.0
#include "fovea/merge_states.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/backends/row_copy.h"
#include "core/check.h"
#include "core/check_device.h"
#include "core/memory_error.h"
#include "core/rounding.h"
#include "core/strided_rows.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/common/mla_prefill_params.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

// Keeps products with 2^31 tokens inside 64 bits, as with the heads of a spec.
constexpr int64_t kMaxStateValues = int64_t{1} << 24;

void check_tokens(int64_t tokens) {
  check_argument(tokens >= 0 && tokens <= INT32_MAX, "tokens is {}, must be in [0, {}]", tokens,
                 INT32_MAX);
}

// The rows of a state, and its LSEs as one row.
StridedRows out_of(const AttentionState& state, const StateShape& shape, int64_t tokens) {
  return {.data = state.out.data,
          .element_bytes = static_cast<int64_t>(dtype_bytes(shape.dtype)),
          .row = shape.dim,
          .dimensions = {{{tokens, state.out.token_stride}, {shape.heads, state.out.head_stride}}}};
}
StridedRows lse_of(const AttentionState& state, const StateShape& shape, int64_t tokens) {
  return {.data = state.lse.data, .element_bytes = sizeof(float), .row = tokens * shape.heads};
}

void check_state(const AttentionState& state, const StateShape& shape, int64_t tokens,
                 std::string_view name) {
  const size_t bytes = dtype_bytes(shape.dtype);
  check_argument(state.out.data != nullptr, "{}.out is null", name);
  check_argument(state.out.dtype == shape.dtype, "{}.out is {}, the merger's shape has {}", name,
                 dtype_name(state.out.dtype), dtype_name(shape.dtype));
  check_argument(reinterpret_cast<uintptr_t>(state.out.data) % bytes == 0,
                 "{}.out is at {}, must be aligned to {} bytes", name, state.out.data, bytes);
  check_argument(bool{state.lse}, "{}.lse is null", name);
  check_aligned(state.lse.data, fmt::format("{}.lse", name));
  check_reach(out_of(state, shape, tokens), fmt::format("{}.out", name));
  check_reach(lse_of(state, shape, tokens), fmt::format("{}.lse", name));
}

// What merge() writes is apart from all else that it is given.
void check_apart(const AttentionState& into, const AttentionState& part, const StateShape& shape,
                 int64_t tokens) {
  const StridedRows out = out_of(into, shape, tokens), lse = lse_of(into, shape, tokens);
  check_argument(are_apart(out),
                 "into.out has strides of {} a token and {} a head: rows of {} values overlap",
                 into.out.token_stride, into.out.head_stride, shape.dim);
  const std::pair<const char*, StridedRows> written[] = {{"into.out", out}, {"into.lse", lse}};
  const std::pair<const char*, StridedRows> read[] = {{"part.out", out_of(part, shape, tokens)},
                                                      {"part.lse", lse_of(part, shape, tokens)}};
  for (const auto& [name, rows] : written) {
    for (const auto& [other, others] : read) {
      check_argument(!share_memory(rows, others), "{} at {} shares memory with {} at {}", name,
                     rows.data, other, others.data);
    }
  }
  check_argument(!share_memory(out, lse), "into.out at {} shares memory with into.lse at {}",
                 out.data, lse.data);
}

void check_states(const AttentionState& into, const AttentionState& part, const StateShape& shape,
                  int64_t tokens) {
  check_state(into, shape, tokens, "into");
  check_state(part, shape, tokens, "part");
  check_apart(into, part, shape, tokens);
}

// Through f32 copies, which grow with the largest call.
class HostMerger final : public StateMerger {
 public:
  HostMerger(const StateShape& shape, ThreadPool& threads) : shape_(shape), threads_(threads) {}

  void merge(const AttentionState& into, const AttentionState& part, int64_t tokens,
             Stream) override {
    check_tokens(tokens);
    if (tokens == 0) return;
    check_states(into, part, shape_, tokens);
    const int64_t rows = tokens * shape_.heads;
    const auto elements = static_cast<size_t>(rows * shape_.dim);
    name_memory([&] { make_room(elements, static_cast<size_t>(rows)); },
                "the states of {} tokens of {} heads of {}", tokens, shape_.heads, shape_.dim);
    const HeadRows sum = dense_rows(out_.data(), DType::f32, shape_.heads, shape_.dim);
    const HeadRows other = rows_from(sum, tokens);
    copy_rows({into.out, sum, tokens, shape_.heads, shape_.dim}, threads_);
    copy_rows({part.out, other, tokens, shape_.heads, shape_.dim}, threads_);
    std::copy_n(into.lse.data, rows, lse_.begin());
    std::copy_n(part.lse.data, rows, lse_.begin() + rows);
    kernels::MergeStatesParams params;
    params.o = out_.data();
    params.lse = lse_.data();
    params.o_part_stride = rows * shape_.dim;
    params.lse_part_stride = rows;
    params.parts = 2;
    params.rows = tokens;
    params.heads = shape_.heads;
    params.dim = shape_.dim;
    params.out = out_.data();
    params.out_lse = into.lse.data;
    kernels::cpu::merge_states(params, threads_);
    copy_rows({sum, into.out, tokens, shape_.heads, shape_.dim}, threads_);
  }

 private:
  void make_room(size_t elements, size_t rows) {
    if (out_.size() < 2 * elements) out_.resize(2 * elements);
    if (lse_.size() < 2 * rows) lse_.resize(2 * rows);
  }

  const StateShape shape_;
  ThreadPool& threads_;
  std::vector<float> out_, lse_;  // of both states
};

class CudaMerger final : public StateMerger {
 public:
  CudaMerger(const StateShape& shape, Device device) : shape_(shape), context_(device.index) {
    const auto type = cuda::variant_type(shape.dtype);
    if (!type) {
      fail(ErrorCode::unsupported, "dtype is {}, on a GPU accepted: bf16, fp16",
           dtype_name(shape.dtype));
    }
    if (shape.dim % 2 != 0) {
      fail(ErrorCode::unsupported, "dim is {}, must be even on a GPU", shape.dim);
    }
    context_.bind();
    add_ = cuda::Kernel(cuda::make_variant(cuda::family("portable/mla_prefill"),
                                           {"add", *type, *type}, context_.info().sm),
                        cuda::kernel_store());
  }
  ~CudaMerger() override { context_.bind_to_free(); }

  void merge(const AttentionState& into, const AttentionState& part, int64_t tokens,
             Stream stream) override {
    check_tokens(tokens);
    if (tokens == 0) return;
    check_states(into, part, shape_, tokens);
    check_rows(into, "into");
    check_rows(part, "part");
    cuda::MlaAddParams add{};
    add.out = into.out.data;
    add.out_token_stride = into.out.token_stride;
    add.out_head_stride = into.out.head_stride;
    add.lse = into.lse.data;
    add.part = part.out.data;
    add.part_token_stride = part.out.token_stride;
    add.part_head_stride = part.out.head_stride;
    add.part_lse = part.lse.data;
    add.tokens = static_cast<int32_t>(tokens);
    add.heads = shape_.heads;
    add.v_dim = shape_.dim;
    context_.bind();
    add_.launch({static_cast<uint32_t>(ceil_div(tokens * shape_.heads, add_.row_tile()))}, add,
                stream);
  }

 private:
  void check_rows(const AttentionState& state, std::string_view name) const {
    constexpr int64_t kBytes = 4;
    check_argument(reinterpret_cast<uintptr_t>(state.out.data) % kBytes == 0,
                   "{}.out is at {}, a GPU needs it aligned to {} bytes", name, state.out.data,
                   kBytes);
    for (const int64_t stride : {state.out.token_stride, state.out.head_stride}) {
      check_argument(stride % 2 == 0,
                     "a stride of {}.out is {} elements, a GPU needs a multiple of {} bytes", name,
                     stride, kBytes);
    }
  }

  const StateShape shape_;
  const gpu::Context context_;
  cuda::Kernel add_;
};

}  // namespace

std::unique_ptr<StateMerger> make_state_merger(const StateShape& shape, Device device,
                                               ThreadPool* threads) {
  check_argument(shape.heads > 0, "heads is {}, must be positive", shape.heads);
  check_argument(shape.dim > 0, "dim is {}, must be positive", shape.dim);
  check_enum(shape.dtype, DType::u8, "dtype", "DType");
  check_argument(is_floating(shape.dtype) && !is_fp8(shape.dtype),
                 "dtype is {}, accepted: fp32, bf16, fp16", dtype_name(shape.dtype));
  const int64_t values = int64_t{shape.heads} * shape.dim;
  check_argument(values <= kMaxStateValues, "a token has {} values in its heads, at most {}",
                 values, kMaxStateValues);
  check_device(device, "device");
  if (device.kind == DeviceKind::cuda) return std::make_unique<CudaMerger>(shape, device);
  check_argument(threads != nullptr, "threads is null, a merger on the CPU runs on them");
  return std::make_unique<HostMerger>(shape, *threads);
}

}  // namespace fovea
