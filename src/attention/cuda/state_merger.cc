// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/state_merger.h"

#include <string_view>

#include "attention/validate/states.h"
#include "core/check.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/portable/merge_states/launch.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

class CudaMerger final : public StateMerger {
 public:
  CudaMerger(const StateShape& shape, Device device) : shape_(shape), context_(device.index) {
    if (!cuda::variant_type(shape.dtype)) {
      fail(ErrorCode::unsupported, "dtype is {}, on a GPU accepted: bf16, fp16",
           dtype_name(shape.dtype));
    }
    if (shape.dim % 2 != 0) {
      fail(ErrorCode::unsupported, "dim is {}, must be even on a GPU", shape.dim);
    }
    context_.bind();
    merge_ = cuda::MergeStates(shape.dtype, context_.info().sm, cuda::kernel_store());
  }
  ~CudaMerger() override { context_.bind_to_free(); }

  void merge(const AttentionState& into, const AttentionState& part, int64_t tokens,
             Stream stream) override {
    check_tokens(tokens);
    if (tokens == 0) return;
    check_states(into, part, shape_, tokens);
    check_rows(into, "into");
    check_rows(part, "part");
    cuda::MergeStatesParams add{};
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
    merge_.run(add, stream);
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
  cuda::MergeStates merge_;
};

}  // namespace

std::unique_ptr<StateMerger> make_cuda_merger(const StateShape& shape, Device device) {
  return std::make_unique<CudaMerger>(shape, device);
}

}  // namespace fovea
