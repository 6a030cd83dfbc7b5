// SPDX-License-Identifier: Apache-2.0
#include "attention/host/prefixes.h"

#include "core/check.h"

namespace fovea {

void HostPrefixes::carve(WorkspaceCarver& workspace, const HostShape& shape,
                         const HostKernels::Shape& kernel_shape, const BatchLimits& limits) {
  kernels_ = shape.kernels;
  shape_ = kernel_shape;
  reserved_ = shares_prefixes(shape.spec) ? limits.prefix_levels : 0;
  if (reserved_ == 0) return;
  rule_ = {max_prefix_q_len(shape.spec), min_saved_keys(shape.cache, limits)};
  max_tokens_ = max_prefix_tokens(shape.spec, limits);
  const int64_t requests = limits.max_requests;
  // A group has no more tokens than the batch.
  BatchLimits group_limits = limits;
  group_limits.max_tokens = max_tokens_;
  const size_t bytes = kernels_->attention_workspace_bytes(shape_, group_limits);
  for (Level& level : std::span(levels_).first(reserved_)) {
    level.groups.q_indptr = workspace.take<int32_t>(requests + 1);
    level.groups.kv_lens = workspace.take<int32_t>(requests);
    level.groups.first_keys = workspace.take<int32_t>(requests);
    level.workspace = workspace.take_bytes(bytes);
  }
  first_keys_ = workspace.take<int32_t>(requests);
  states_.carve(workspace, shape, shape_, reserved_ + 1, max_tokens_);
}

void HostPrefixes::check_pages(const BatchView& batch, const kernels::AttentionParams& params,
                               int32_t page_size) const {
  for (int32_t i = 1; i < batch.requests; ++i) {
    const int32_t shared = batch.hints.shared_prefix[i];
    const int32_t most = std::min(batch.kv_lens[i - 1], batch.kv_lens[i]);
    check_argument(shared >= 0 && shared <= most, "shared_prefix[{}] is {}, must be in [0, {}]", i,
                   shared, most);
    // Requests without new tokens join no group and have no pages in the table.
    const int32_t* q = batch.q_indptr.data() + i;
    if (q[-1] == q[0] || q[0] == q[1]) continue;
    const int32_t* pages = params.keys.page_table + i * params.keys.page_table_stride;
    const int32_t* before = pages - params.keys.page_table_stride;
    for (int32_t page = 0; page < (shared + page_size - 1) / page_size; ++page) {
      check_argument(
          pages[page] == before[page],
          "shared_prefix[{}] is {}, but token {} lies in page {} and that of the request "
          "before in page {}",
          i, shared, page * page_size, pages[page], before[page]);
    }
  }
}

kernels::AttentionParams HostPrefixes::params_of(const kernels::AttentionParams& batch,
                                                 const PrefixLevel& groups) const {
  kernels::AttentionParams params = batch;
  params.q_indptr = groups.q_indptr;
  params.kv_lens = groups.kv_lens;
  params.mask = {.causal = false, .first_keys = groups.first_keys};
  return params;
}

bool HostPrefixes::plan(const BatchView& batch, const kernels::AttentionParams& params,
                        int32_t page_size) {
  used_ = 0;
  if (reserved_ == 0 || batch.hints.shared_prefix.empty()) return false;
  check_pages(batch, params, page_size);
  if (batch.tokens > max_tokens_) return false;
  std::array<PrefixLevel, kMaxPrefixLevels> groups;
  for (size_t i = 0; i < groups.size(); ++i) groups[i] = levels_[i].groups;
  used_ = find_prefix_levels(batch, rule_, std::span(groups).first(reserved_), first_keys_);
  for (Level& level : std::span(levels_).first(used_)) {
    level.schedule =
        kernels_->plan_attention(shape_, params_of(params, level.groups), level.workspace);
  }
  return used_ > 0;
}

void HostPrefixes::run(const kernels::AttentionParams& params,
                       const HostKernels::Schedule& schedule, ThreadPool& threads) const {
  states_.run(0, params, schedule, threads);
  for (int32_t pass = 1; pass <= used_; ++pass) {
    const Level& level = levels_[pass - 1];
    states_.run(pass, params_of(params, level.groups), level.schedule, threads);
  }
  states_.join(used_ + 1, params, threads);
}

}  // namespace fovea
