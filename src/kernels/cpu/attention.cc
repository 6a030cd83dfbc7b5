// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/attention.h"

#include <algorithm>

#include "core/check.h"
#include "kernels/cpu/attention_layout.h"
#include "kernels/cpu/simd/attention/work.h"

namespace fovea::kernels::cpu {
namespace {

struct Kernels {
  AttentionItemFunction item;
  AttentionMergeFunction merge;
};

Kernels kernels_of(Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return {avx512::attention_item, avx512::attention_merge};
  if (isa == Isa::avx2) return {avx2::attention_item, avx2::attention_merge};
#endif
  fail(ErrorCode::unsupported, "the CPU attention is not built for instruction set {}",
       isa_name(isa));
}

}  // namespace

size_t attention_workspace_bytes(const AttentionShape& shape, const BatchLimits& limits) {
  AttentionNeed need;
  need.requests = limits.max_requests;
  need.tokens = limits.max_tokens;
  need.max_kv_len = std::max({limits.max_kv_len, limits.max_q_len, limits.max_encoder_len});
  return AttentionLayout(shape, need).total;
}

void attention(const AttentionShape& shape, const AttentionParams& params,
               const AttentionSchedule& schedule, ThreadPool& threads) {
  const Kernels kernels = kernels_of(shape.isa);
  check_argument(threads.size() <= shape.threads,
                 "the attention was planned for {} threads, not {}", shape.threads, threads.size());
  check_argument(params.scale > 0, "scale is {}, must be positive", params.scale);
  const AttentionCall call = {&params, schedule.partials};
  AttentionNeed need;
  need.max_kv_len = schedule.max_kv_len;
  const size_t scratch_bytes = AttentionLayout(shape, need).scratch_bytes;
  threads.parallel_for(static_cast<int64_t>(schedule.items.size()), [&](int64_t index, int worker) {
    const AttentionScratch scratch = attention_scratch(
        shape, schedule.max_kv_len, schedule.scratch + scratch_bytes * static_cast<size_t>(worker));
    kernels.item(call, schedule.items[static_cast<size_t>(index)], scratch);
  });
  threads.parallel_for(static_cast<int64_t>(schedule.merges.size()), [&](int64_t index, int) {
    kernels.merge(call, schedule.merges[static_cast<size_t>(index)]);
  });
}

}  // namespace fovea::kernels::cpu
