// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/prefixes.h"

#include <algorithm>

#include "core/rounding.h"

namespace fovea {

namespace cuda = kernels::cuda;

int32_t prefix_levels(const CudaKernels& table, const AttentionSpec& spec,
                      const BatchLimits& limits) {
  return table.groups != nullptr && shares_prefixes(spec) ? limits.prefix_levels : 0;
}

std::vector<gpu::KernelVariant> prefix_variants(const AttentionSpec& spec, int sm) {
  return {cuda::prefix_join_variant(activation_dtype(spec), sm)};
}

void CudaPrefixes::carve(WorkspaceCarver& workspace, const CudaKernels& table,
                         const cuda::AttentionSetup& setup, const BatchLimits& limits) {
  levels_ = prefix_levels(table, setup.spec, limits);
  if (levels_ == 0) return;
  rule_ = {max_prefix_q_len(setup.spec), min_saved_keys(setup.cache, limits)};
  row_tile_ = table.groups->row_tile;
  limits_ = limits;
  limits_.max_tokens = max_prefix_tokens(setup.spec, limits);
  const int64_t requests = limits.max_requests;
  const int64_t rows = int64_t{limits_.max_tokens} * setup.spec.q_heads;
  level_bytes_ = static_cast<int64_t>(
      round_up(table.groups->workspace_bytes(setup, limits_), kWorkspaceAlignment));
  plans_ = workspace.take<std::byte>(levels_ * level_bytes_);
  for (Level& level : std::span(level_).first(levels_)) {
    level.groups.q_indptr = workspace.take<int32_t>(requests + 1);
    level.groups.kv_lens = workspace.take<int32_t>(requests);
    level.groups.first_keys = workspace.take<int32_t>(requests);
    level.groups.begins = workspace.take<int32_t>(requests);
    level.out = workspace.take<float>(rows * setup.spec.head_dim_v);
    level.lse = workspace.take<float>(rows);
  }
  first_keys_ = workspace.take<int32_t>(requests);
  if (requests > cuda::kHeldRequests) {
    scratch_ = workspace.take<int32_t>(cuda::kMaxPlanBlocks * requests * cuda::kPrefixScratch);
  }
  own_lse_ = workspace.take<float>(rows);
}

void CudaPrefixes::load(const CudaKernels& table, const cuda::AttentionSetup& setup,
                        gpu::KernelStore& store) {
  if (levels_ == 0) return;
  for (int32_t i = 0; i < levels_; ++i) {
    level_[i].kernel = table.groups->load(setup, store);
    level_[i].kernel->reserve(limits_, plans_ + i * level_bytes_);
  }
  join_.emplace(prefix_variants(setup.spec, setup.sm).front(), store);
}

namespace {

// Returns the groups of a level as a batch in which every query sees every key.
cuda::BatchParams batch_of(const cuda::BatchParams& batch, const cuda::PrefixGroups& groups) {
  cuda::BatchParams level = batch;
  level.q_indptr = groups.q_indptr;
  level.kv_lens = groups.kv_lens;
  level.max_q_len = kMaxPrefixRows;  // several requests have more tokens than any of them
  level.min_kv_len = 1;
  level.mask = {};
  level.mask.first_keys = groups.first_keys;
  return level;
}

}  // namespace

void CudaPrefixes::find_groups(const BatchView& batch, cuda::BatchParams& params,
                               cuda::PlanTasks& tasks) const {
  const int32_t group = params.q_heads / params.kv_heads;
  cuda::PrefixGroupsParams& prefixes = tasks.prefixes;
  prefixes.q_indptr = params.q_indptr;
  prefixes.kv_lens = params.kv_lens;
  prefixes.shared_prefix = batch.hints.shared_prefix.data();
  for (int32_t i = 0; i < levels_; ++i) prefixes.groups[i] = level_[i].groups;
  prefixes.first_keys = first_keys_;
  prefixes.scratch = scratch_;
  prefixes.requests = params.requests;
  prefixes.max_q_len = rule_.max_q_len;
  prefixes.tile_tokens = std::max(row_tile_ / group, 1);
  prefixes.min_prefix = kMinPrefix;
  prefixes.min_saved = rule_.min_saved;
  prefixes.more_saved = extra_saved(rule_.min_saved);
  prefixes.levels = levels_;
  tasks.level_bytes = level_bytes_;
  params.mask.first_keys = first_keys_;
}

void CudaPrefixes::plan(const BatchView& batch, const cuda::BatchParams& params, bool after_decode,
                        cuda::PlanQueue& plans) {
  plan_complete_ = false;
  for (Level& level : std::span(level_).first(levels_)) {
    level.state = {.groups = level.groups, .out = level.out, .lse = level.lse};
    level.kernel->plan({.batch = batch_of(params, level.groups),
                        .tokens = batch.tokens,
                        .role = cuda::PassRole::groups,
                        .after_decode = after_decode,
                        .unmerged = &level.state},
                       plans);
  }
}

void CudaPrefixes::attend(const cuda::AttentionParams& params, int32_t layer,
                          gpu::Launcher launcher) const {
  for (const Level& level : std::span(level_).first(levels_)) {
    cuda::AttentionParams pass = params;
    pass.batch = batch_of(params.batch, level.groups);
    pass.out = level.out;
    pass.f32_out = 1;
    pass.lse = level.lse;
    pass.sinks = nullptr;
    level.kernel->attend(pass, layer, launcher);
  }
}

void CudaPrefixes::join(const cuda::AttentionParams& params, float* lse, gpu::Launcher launcher) {
  cuda::PrefixJoinParams join{};
  join.batch = params.batch;
  join.first_keys = first_keys_;
  join.levels = levels_;
  for (int32_t i = 0; i < levels_; ++i) join.states[i] = level_[i].state;
  join.out = params.out;
  join.out_token_stride = params.out_token_stride;
  join.out_head_stride = params.out_head_stride;
  join.own_lse = params.lse;
  join.lse = lse;
  join.sinks = params.sinks;
  join.head_dim_v = params.head_dim_v;
  join.plan_complete = plan_complete_;
  plan_complete_ = true;
  join_->run(join, launcher);
}

}  // namespace fovea
