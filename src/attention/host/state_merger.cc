// SPDX-License-Identifier: Apache-2.0
#include "attention/host/state_merger.h"

#include <algorithm>
#include <vector>

#include "attention/host/row_copy.h"
#include "attention/row_views.h"
#include "attention/validate/states.h"
#include "core/memory_error.h"
#include "kernels/cpu/cpu.h"

namespace fovea {
namespace {

// Merges f32 copies of both states. The copies grow with the largest call.
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
  std::vector<float> out_, lse_;  // both states
};

}  // namespace

std::unique_ptr<StateMerger> make_host_merger(const StateShape& shape, ThreadPool& threads) {
  return std::make_unique<HostMerger>(shape, threads);
}

}  // namespace fovea
