// SPDX-License-Identifier: Apache-2.0
#include "fovea/merge_states.h"

#include <string_view>
#include <vector>

#include "attention/backends/row_copy.h"
#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/common/mla_prefill_params.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

void check_tokens(int64_t tokens) {
  check_argument(tokens >= 0 && tokens <= INT32_MAX, "tokens is {}, must be in [0, {}]", tokens,
                 INT32_MAX);
}

void check_state(const AttentionState& state, const StateShape& shape, std::string_view name) {
  check_argument(state.out.data != nullptr, "{}.out is null", name);
  check_argument(state.out.dtype == shape.dtype, "{}.out is {}, the merger's shape has {}", name,
                 dtype_name(state.out.dtype), dtype_name(shape.dtype));
  check_argument(bool{state.lse}, "{}.lse is null", name);
}

// Through f32 copies, which grow with the largest call.
class HostMerger final : public StateMerger {
 public:
  HostMerger(const StateShape& shape, ThreadPool& threads) : shape_(shape), threads_(threads) {}

  void merge(const AttentionState& into, const AttentionState& part, int64_t tokens,
             Stream) override {
    check_tokens(tokens);
    if (tokens == 0) return;
    check_state(into, shape_, "into");
    check_state(part, shape_, "part");
    const int64_t rows = tokens * shape_.heads;
    const auto elements = static_cast<size_t>(rows * shape_.dim);
    if (out_.size() < 2 * elements) out_.resize(2 * elements);
    const HeadRows sum = dense_rows(out_.data(), DType::f32, shape_.heads, shape_.dim);
    const HeadRows other = rows_from(sum, tokens);
    copy_rows({into.out, sum, tokens, shape_.heads, shape_.dim}, threads_);
    copy_rows({part.out, other, tokens, shape_.heads, shape_.dim}, threads_);
    lse_.assign(into.lse.data, into.lse.data + rows);
    lse_.insert(lse_.end(), part.lse.data, part.lse.data + rows);
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
    check_state(state, shape_, name);
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
  check_argument(is_floating(shape.dtype) && !is_fp8(shape.dtype),
                 "dtype is {}, accepted: fp32, bf16, fp16", dtype_name(shape.dtype));
  if (device.kind == DeviceKind::cuda) return std::make_unique<CudaMerger>(shape, device);
  check_argument(threads != nullptr, "threads is null, a merger on the CPU runs on them");
  return std::make_unique<HostMerger>(shape, *threads);
}

}  // namespace fovea
