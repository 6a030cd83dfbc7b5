// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/context/launch.h"

#include <algorithm>

#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int64_t kMaxPlanBlocks = 256;

Kernel load(const char* op, int sm, gpu::KernelStore& store) {
  return Kernel(make_variant(family("portable/context"), {op}, sm), store);
}

int64_t heads(const ExchangedTokens& rows) { return int64_t{rows.tokens} * rows.heads; }

}  // namespace

ContextPlan::ContextPlan(int sm, gpu::KernelStore& store) : kernel_(load("plan", sm, store)) {}

void ContextPlan::run(const ContextPlanParams& params, gpu::Launcher launcher) const {
  const int64_t local = std::max<int64_t>(params.tokens, int64_t{params.requests} * params.classes);
  const int64_t blocks =
      std::max<int64_t>(ceil_div(local, int64_t{kernel_.row_tile()}), params.requests);
  kernel_.launch({static_cast<uint32_t>(std::clamp<int64_t>(blocks, 1, kMaxPlanBlocks))}, params,
                 launcher, kOverlapped);
}

ContextMail::ContextMail(DType dtype, int sm, int multiprocessors, gpu::KernelStore& store)
    : queries_(load("queries", sm, store)),
      states_(load(dtype == DType::bf16 ? "states_bf16" : "states_f16", sm, store)),
      max_blocks_(2 * std::max(1, multiprocessors)) {}

uint32_t ContextMail::blocks(const ExchangedTokens& rows, const Kernel& kernel) const {
  const int64_t needed = ceil_div(heads(rows) * rows.quads, int64_t{kernel.row_tile()});
  return static_cast<uint32_t>(std::clamp<int64_t>(needed, 1, max_blocks_));
}

void ContextMail::gather(const GatherQueriesParams& params, gpu::Launcher launcher) const {
  queries_.launch({blocks(params.rows, queries_)}, params, launcher, kOverlapped);
}

void ContextMail::merge(const MergeContextParams& params, gpu::Launcher launcher) const {
  states_.launch({blocks(params.rows, states_)}, params, launcher, kOverlapped);
}

int64_t ContextMail::words(const GatherQueriesParams& params) {
  return 4 * heads(params.rows) * params.rows.quads;
}

int64_t ContextMail::words(const MergeContextParams& params) {
  return round_up(heads(params.rows) * (4 * params.rows.quads + 1), int64_t{4});
}

}  // namespace fovea::kernels::cuda
