// SPDX-License-Identifier: Apache-2.0
#include "engine/group_backends.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "attention/validate/spec.h"
#include "core/check.h"
#include "dist/cuda_context_backend.h"
#include "fovea/context_parallel.h"

namespace fovea {
namespace {

// Returns how many tokens back a query of these layers can see, or 0 if there is no bound. A chunk
// never reaches further than a window of its length.
int32_t reach(const AttentionSpec& spec) {
  if (spec.window == 0 || spec.chunk == 0) return std::max(spec.window, spec.chunk);
  return std::min(spec.window, spec.chunk);
}

void check_kv_dtype(const EngineOptions& options) {
  check_argument(is_floating(options.kv_dtype),
                 "kv_dtype is {}, must be fp32, fp16, bf16, fp8_e4m3 or fp8_e5m2",
                 dtype_name(options.kv_dtype));
  check_argument(is_fp8(options.kv_dtype) || options.kv_scale == KvScale::none,
                 "kv_scale needs an fp8 kv_dtype, which is {}", dtype_name(options.kv_dtype));
}

KvCacheSpec kv_cache_spec(const LayerGroup& group, const EngineOptions& options) {
  KvCacheSpec cache;
  cache.dtype = options.kv_dtype;
  cache.scale = options.kv_scale;
  cache.layers = static_cast<int32_t>(group.layers.size());
  cache.kv_heads = group.spec.kv_heads;
  cache.head_dim = cached_key_dim(group.spec);
  cache.head_dim_v = cached_value_dim(group.spec);
  // Pages of the allocator are pages of all ranks that hold the context together.
  cache.page_size = options.page_size / group.context_ranks;
  cache.window = reach(group.spec);
  // The CPU kernel reads the keys of a tile head by head.
  if (options.device == "cpu") cache.order = KvOrder::hnd;
  if (group.spec.kind == AttentionKind::mla) cache.layout = KvLayout::mla;
  if (cache.layout == KvLayout::mla && fits_mla_fp8_rows(cache)) {
    cache.layout = KvLayout::mla_fp8_rows;
  } else if (is_fp8(cache.dtype) && cache.scale == KvScale::none) {
    cache.scale = KvScale::per_token_head;
  }
  return cache;
}

StateCacheSpec state_cache_spec(const LayerGroup& group, const EngineOptions& options) {
  StateCacheSpec state = group.state;
  if (options.speculate.empty() || !can_keep_drafts(group.spec.kind)) return state;
  state.max_drafts = options.max_drafts;
  state.draft_inputs = draft_row(group.spec).size;
  return state;
}

ContextBackendOptions context_options(const GroupSelection& selection, int32_t ranks) {
  return {.spec = selection.request.spec,
          .shards = {ranks, 1},
          .page_size = selection.request.cache.page_size};
}

const BackendEntry& decode_entry(const GroupSelection& selection) {
  return selection.decode ? *selection.decode->chosen : *selection.prefill.chosen;
}

}  // namespace

std::vector<CacheGroup> cache_groups(const ModelInfo& model, const EngineOptions& options) {
  check_kv_dtype(options);
  std::vector<CacheGroup> groups;
  for (const LayerGroup& group : model.groups) {
    if (is_linear(group.spec.kind)) {
      groups.push_back({{}, state_cache_spec(group, options)});
    } else {
      groups.push_back({kv_cache_spec(group, options), {}});
    }
  }
  const auto linear = std::ranges::count_if(
      groups, [](const CacheGroup& group) { return group.state.has_value(); });
  if (linear > 1) {
    fail(ErrorCode::unsupported, "{} has {} groups of linear layers, at most 1 is supported",
         model.architecture, linear);
  }
  return groups;
}

std::vector<GroupSelection> select_group_backends(const ModelInfo& model,
                                                  const std::vector<CacheGroup>& caches,
                                                  const EngineOptions& options,
                                                  const BatchLimits& limits,
                                                  const DeviceInfo& device) {
  std::vector<GroupSelection> selections;
  for (size_t g = 0; g < model.groups.size(); ++g) {
    const LayerGroup& group = model.groups[g];
    GroupSelection selection;
    selection.layers = fmt::format("layers {}", fmt::join(group.layers, ", "));
    selection.request.spec = group.spec;
    selection.request.spec.batch_invariant = options.batch_invariant;
    if (caches[g].kv) selection.request.cache = *caches[g].kv;
    selection.request.limits = group.context_ranks > 1
                                   ? local_limits({group.context_ranks, 1}, limits, device.kind)
                                   : limits;
    selection.request.device = device;
    const BackendRegistry& registry = *options.registry;
    const bool linear = is_linear(group.spec.kind);
    selection.prefill =
        select_backend(registry, selection.request, linear ? BackendWish{} : options.backend);
    if (options.decode_backend && !linear) {
      selection.decode = select_backend(registry, selection.request, *options.decode_backend);
    }
    if (options.draft_branches > 1) {
      BackendRequest trees = selection.request;
      trees.spec.mask = MaskKind::tree;
      selection.trees = select_backend(registry, trees, options.backend);
    }
    const BackendEntry& decode = decode_entry(selection);
    check_argument(!options.batch_invariant || &decode == selection.prefill.chosen,
                   "batch_invariant needs one backend for all batches: backend is {}, "
                   "decode_backend is {}",
                   selection.prefill.chosen->name, decode.name);
    if (device.kind == DeviceKind::cuda && options.cuda_graphs &&
        decode.graphs == GraphSupport::never) {
      selection.why_no_graphs =
          fmt::format("decode steps are enqueued, not replayed: {} captures no batch", decode.name);
    }
    if (group.context_ranks > 1 && device.kind == DeviceKind::cuda) {
      // The context backend carves its own arrays from the same workspace.
      const size_t bytes =
          context_workspace_bytes(context_options(selection, group.context_ranks), limits);
      selection.prefill.workspace_bytes += bytes;
      if (selection.decode) selection.decode->workspace_bytes += bytes;
    }
    selections.push_back(std::move(selection));
  }
  return selections;
}

std::unique_ptr<AttentionBackend> create_group_backend(const GroupSelection& selection,
                                                       const BackendContext& context,
                                                       const GroupRanks& ranks) {
  std::unique_ptr<AttentionBackend> backend = selection.prefill.chosen->create(context);
  const BackendEntry& decode = decode_entry(selection);
  if (&decode != selection.prefill.chosen) {
    backend = compose_by_phase(std::move(backend), decode.create(context));
  }
  if (selection.trees) {
    BackendContext trees = context;
    trees.spec.mask = MaskKind::tree;
    backend = compose_by_mask(std::move(backend), selection.trees->chosen->create(trees));
  }
  if (ranks.context_ranks == 1) {
    backend->reserve(selection.request.limits);
    return backend;
  }
  const ContextBackendOptions options = context_options(selection, ranks.context_ranks);
  backend = ranks.links != nullptr
                ? make_cuda_context_backend(std::move(backend), options, *ranks.links)
                : make_context_backend(std::move(backend), options, *ranks.communicator,
                                       *context.threads);
  backend->reserve(ranks.limits);
  return backend;
}

// The parts of a composition use the same bytes.
size_t GroupSelection::workspace_bytes() const {
  size_t bytes = prefill.workspace_bytes;
  for (const std::optional<Selection>* part : {&decode, &trees}) {
    if (*part) bytes = std::max(bytes, (*part)->workspace_bytes);
  }
  return bytes;
}

std::string explain(const GroupSelection& selection) {
  std::string text = selection.layers;
  if (!selection.why_no_graphs.empty()) text += "; " + selection.why_no_graphs;
  if (selection.decode) text += ", prefill and mixed batches";
  text += "\n" + selection.prefill.explain();
  const auto add = [&](const std::optional<Selection>& part, std::string_view batches) {
    if (part) text += fmt::format("{}, {}\n{}", selection.layers, batches, part->explain());
  };
  add(selection.decode, "decode batches");
  add(selection.trees, "trees of drafts");
  return text;
}

}  // namespace fovea
