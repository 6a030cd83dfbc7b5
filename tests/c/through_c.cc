// SPDX-License-Identifier: Apache-2.0
#include "c/through_c.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace fovea::test {
namespace {

template <typename T>
const DLTensor* add_array(TensorList& tensors, std::span<const T> array, DType dtype) {
  return tensors.add(array.data(), dtype, {static_cast<int64_t>(array.size())});
}

const DLTensor* add_table(TensorList& tensors, const TokenTable& table) {
  return tensors.add(table.entries, DType::i32, {table.rows, table.stride});
}

const DLTensor* add_cache(TensorList& tensors, const KvCacheSpec& spec, int64_t pages, char* data,
                          std::array<int64_t, 3> strides, int64_t width) {
  const auto [page, token, head] = strides;
  if (spec.layout == KvLayout::mla_fp8_rows) {
    return tensors.add(data, DType::u8, {pages, spec.page_size, 656}, {page, token, 1});
  }
  if (spec.layout == KvLayout::mla) {
    return tensors.add(data, spec.dtype, {pages, spec.page_size, width}, {page, token, 1});
  }
  if (spec.order == KvOrder::hnd) {
    return tensors.add(data, spec.dtype, {pages, spec.kv_heads, spec.page_size, width},
                       {page, head, token, 1});
  }
  return tensors.add(data, spec.dtype, {pages, spec.page_size, spec.kv_heads, width},
                     {page, token, head, 1});
}

const DLTensor* add_scale(TensorList& tensors, const KvCacheSpec& spec, int64_t slots,
                          const float* data) {
  if (spec.scale == KvScale::none) return nullptr;
  if (spec.scale == KvScale::per_tensor) return tensors.add(data, DType::f32, {1});
  if (spec.scale == KvScale::per_head) return tensors.add(data, DType::f32, {spec.kv_heads});
  return tensors.add(data, DType::f32, {slots, spec.kv_heads});
}

fovea_kv_pool* lend(const KvPool& pool) {
  const KvCacheSpec& spec = pool.spec();
  const fovea_kv_cache_spec c_spec = to_c(spec);
  std::vector<std::unique_ptr<TensorList>> lists;
  std::vector<fovea_kv_memory> layers;
  for (int32_t i = 0; i < spec.layers; ++i) {
    const KvLayerView view = pool.layer(i);
    TensorList& list = *lists.emplace_back(std::make_unique<TensorList>(pool.device()));
    const bool separate = spec.layout == KvLayout::mha;
    fovea_kv_memory memory{};
    memory.k =
        add_cache(list, spec, pool.pages(), view.k,
                  {view.k_page_stride, view.k_token_stride, view.k_head_stride}, spec.head_dim);
    memory.k_scale = add_scale(list, spec, view.slots, view.k_scale);
    if (separate) {
      memory.v =
          add_cache(list, spec, pool.pages(), view.v,
                    {view.v_page_stride, view.v_token_stride, view.v_head_stride}, spec.head_dim_v);
      memory.v_scale = add_scale(list, spec, view.slots, view.v_scale);
    }
    layers.push_back(memory);
  }
  TensorList maps(pool.device());
  fovea_lent_pool lent;
  check_status(fovea_lent_pool_init(&lent, sizeof lent));
  lent.spec = &c_spec;
  lent.device = to_c(pool.device());
  lent.reserves_page_zero = pool.reserves_page_zero();
  lent.layers = layers.data();
  const auto slots = static_cast<int64_t>(pool.slot_map().size());
  if (slots > 0) {
    lent.slot_map = maps.add_on_host(pool.slot_map().data(), DType::i64, {slots});
    if (pool.device().kind == DeviceKind::cuda) {
      lent.device_slot_map = maps.add(pool.device_slot_map(), DType::i64, {slots});
    }
  }
  fovea_kv_pool* made = nullptr;
  check_status(fovea_kv_pool_lend(&lent, &made));
  return made;
}

class ThroughC final : public AttentionBackend {
 public:
  ThroughC(const BackendContext& context, const BackendRequest& request, const std::string& name)
      : spec_(context.spec),
        name_(name),
        device_(context.device),
        batch_(context.device),
        layer_(context.device) {
    const fovea_attention_spec spec = to_c(context.spec);
    const fovea_kv_cache_spec cache = to_c(request.cache);
    const fovea_batch_limits limits = to_c(request.limits);
    const fovea_device_info info = to_c(request.device);
    fovea_selection_request wanted;
    check_status(fovea_selection_request_init(&wanted, sizeof wanted));
    wanted.spec = &spec;
    wanted.cache = &cache;
    wanted.limits = &limits;
    wanted.device = &info;
    wanted.backend = name_.c_str();
    fovea_selection* selection = nullptr;
    fovea_kv_pool* pool = nullptr;
    fovea_thread_pool* threads = nullptr;
    check_status(fovea_selection_create(&wanted, &selection));
    if (context.kv != nullptr) pool = lend(*context.kv);
    if (context.threads != nullptr) {
      check_status(fovea_thread_pool_create(context.threads->size(), &threads));
    }
    const fovea_status status = fovea_backend_create(selection, pool, nullptr, threads, &backend_);
    // The backend keeps alive what it uses.
    EXPECT_EQ(fovea_kv_pool_destroy(pool), FOVEA_OK);
    EXPECT_EQ(fovea_thread_pool_destroy(threads), FOVEA_OK);
    EXPECT_EQ(fovea_selection_destroy(selection), FOVEA_OK);
    check_status(status);
  }
  ~ThroughC() override { EXPECT_EQ(fovea_backend_destroy(backend_), FOVEA_OK); }
  ThroughC(const ThroughC&) = delete;
  ThroughC& operator=(const ThroughC&) = delete;

  std::string_view name() const override { return name_; }
  Device device() const override { return device_; }

  size_t workspace_bytes(const BatchLimits& limits) const override {
    const fovea_batch_limits given = to_c(limits);
    size_t bytes = 0;
    check_status(fovea_backend_workspace_bytes(backend_, &given, &bytes));
    return bytes;
  }

  void reserve(const BatchLimits& limits, std::span<std::byte> workspace) override {
    const fovea_batch_limits given = to_c(limits);
    check_status(fovea_backend_reserve(
        backend_, &given, workspace.empty() ? nullptr : workspace.data(), workspace.size()));
  }

  void plan(const BatchView& batch, Stream stream) override {
    batch_.clear();
    const fovea_batch given = to_c(batch, batch_);
    tokens_ = batch.tokens;
    check_status(fovea_backend_plan(backend_, &given, stream));
  }

  void forward(const LayerTensors& layer, Stream stream) override {
    layer_.clear();
    const fovea_layer_tensors given = to_c(layer, spec_, tokens_, layer_);
    check_status(fovea_backend_forward(backend_, &given, stream));
  }

 private:
  AttentionSpec spec_;
  std::string name_;
  Device device_;
  TensorList batch_, layer_;
  int64_t tokens_ = 0;
  fovea_backend* backend_ = nullptr;
};

int64_t query_dim(const AttentionSpec& spec, bool separate_rope) {
  if (spec.kind != AttentionKind::mla) return spec.head_dim;
  const int32_t front = spec.mla.nope_dim > 0 ? spec.mla.nope_dim : spec.mla.kv_lora_rank;
  return front + (separate_rope ? 0 : spec.mla.rope_dim);
}

}  // namespace

fovea_device to_c(Device device) {
  return {device.kind == DeviceKind::cpu ? FOVEA_CPU : FOVEA_CUDA, device.index};
}

fovea_attention_spec to_c(const AttentionSpec& spec) {
  fovea_attention_spec to;
  check_status(fovea_attention_spec_init(&to, sizeof to));
  to.kind = static_cast<int32_t>(spec.kind);
  to.scope = static_cast<int32_t>(spec.scope);
  to.mask = static_cast<int32_t>(spec.mask);
  to.q_heads = spec.q_heads;
  to.kv_heads = spec.kv_heads;
  to.head_dim = spec.head_dim;
  to.head_dim_v = spec.head_dim_v;
  to.q_dtype = static_cast<int32_t>(spec.q_dtype);
  to.window = spec.window;
  to.chunk = spec.chunk;
  to.dual_chunk = {spec.dual_chunk.chunk_size, spec.dual_chunk.local_size};
  to.has_rope = spec.has_rope;
  to.needs_lse = spec.needs_lse;
  to.batch_invariant = spec.batch_invariant;
  to.scores = {spec.scores.softmax_scale, spec.scores.logit_cap, spec.scores.has_sinks,
               spec.scores.has_alibi};
  to.mla = {spec.mla.kv_lora_rank, spec.mla.rope_dim, spec.mla.nope_dim, spec.mla.v_dim};
  to.linear = {spec.linear.key_heads, spec.linear.value_heads, spec.linear.key_dim,
               spec.linear.value_dim, spec.linear.conv_width};
  return to;
}

fovea_kv_cache_spec to_c(const KvCacheSpec& spec) {
  fovea_kv_cache_spec to;
  check_status(fovea_kv_cache_spec_init(&to, sizeof to));
  to.layout = static_cast<int32_t>(spec.layout);
  to.order = static_cast<int32_t>(spec.order);
  to.dtype = static_cast<int32_t>(spec.dtype);
  to.scale = static_cast<int32_t>(spec.scale);
  to.layers = spec.layers;
  to.kv_heads = spec.kv_heads;
  to.head_dim = spec.head_dim;
  to.head_dim_v = spec.head_dim_v;
  to.page_size = spec.page_size;
  to.window = spec.window;
  return to;
}

fovea_batch_limits to_c(const BatchLimits& limits) {
  fovea_batch_limits to;
  check_status(fovea_batch_limits_init(&to, sizeof to));
  to.max_requests = limits.max_requests;
  to.max_tokens = limits.max_tokens;
  to.max_q_len = limits.max_q_len;
  to.max_kv_len = limits.max_kv_len;
  to.max_encoder_len = limits.max_encoder_len;
  to.prefix_levels = limits.prefix_levels;
  to.min_prefix_savings = limits.min_prefix_savings;
  to.workspace_budget = limits.workspace_budget;
  return to;
}

fovea_device_info to_c(const DeviceInfo& info) {
  fovea_device_info to;
  check_status(fovea_device_info_init(&to, sizeof to));
  to.sm = info.sm;
  to.device = to_c(info.device());
  to.cores = info.cores;
  to.memory_bytes = info.memory_bytes;
  std::strncpy(to.name, info.name.c_str(), sizeof to.name - 1);
  std::strncpy(to.isa, info.isa.c_str(), sizeof to.isa - 1);
  return to;
}

fovea_tensor& TensorList::next() { return tensors_.at(used_++); }

const DLTensor* TensorList::add(const void* data, DType dtype, std::initializer_list<int64_t> shape,
                                std::initializer_list<int64_t> strides) {
  if (data == nullptr) return nullptr;
  fovea_tensor& tensor = next();
  check_status(fovea_tensor_init(&tensor, const_cast<void*>(data), static_cast<int32_t>(dtype),
                                 device_, shape.begin(), static_cast<int32_t>(shape.size())));
  std::copy(strides.begin(), strides.end(), tensor.strides);
  return &tensor.view;
}

const DLTensor* TensorList::add_on_host(const void* data, DType dtype,
                                        std::initializer_list<int64_t> shape) {
  const DLTensor* const tensor = add(data, dtype, shape);
  if (tensor != nullptr) const_cast<DLTensor*>(tensor)->device = {kDLCPU, 0};
  return tensor;
}

const DLTensor* TensorList::add_unsigned(const void* data, uint8_t bits,
                                         std::initializer_list<int64_t> shape) {
  const DLTensor* const tensor = add(data, DType::u8, shape);
  if (tensor != nullptr) const_cast<DLTensor*>(tensor)->dtype.bits = bits;
  return tensor;
}

const DLTensor* TensorList::add(const HeadRows& rows, int64_t tokens, int64_t heads, int64_t dim) {
  return add(rows.data, rows.dtype, {tokens, heads, dim}, {rows.token_stride, rows.head_stride, 1});
}

fovea_batch to_c(const BatchView& batch, TensorList& tensors) {
  const auto ints = [&](std::span<const int32_t> array) {
    return add_array(tensors, array, DType::i32);
  };
  const auto longs = [&](std::span<const int64_t> array) {
    return add_array(tensors, array, DType::i64);
  };
  const auto on_host = [&](std::span<const int32_t> array) {
    return tensors.add_on_host(array.data(), DType::i32, {static_cast<int64_t>(array.size())});
  };
  fovea_batch to;
  check_status(fovea_batch_init(&to, sizeof to));
  to.mode = static_cast<int32_t>(batch.mode);
  to.requests = batch.requests;
  to.tokens = batch.tokens;
  to.q_indptr = ints(batch.q_indptr);
  to.kv_lens = ints(batch.kv_lens);
  to.request_rows = ints(batch.request_rows);
  to.table = add_table(tensors, batch.table);
  to.out_slots = longs(batch.out_slots);
  to.positions = ints(batch.positions);
  to.entry_tokens = batch.table.entry_tokens;
  const BatchMasks& masks = batch.masks;
  to.masks.tree_ancestors = tensors.add_unsigned(
      masks.tree.ancestors.data(), 64, {static_cast<int64_t>(masks.tree.ancestors.size())});
  to.masks.custom_visible = add_array(tensors, masks.custom.visible, DType::u8);
  to.masks.custom_indptr = longs(masks.custom.indptr);
  to.masks.spans_bounds = ints(masks.spans.bounds);
  to.masks.spans_indptr = ints(masks.spans.indptr);
  const auto prefixes = static_cast<int64_t>(masks.items.prefix_lens.size());
  to.masks.items_prefix_lens = tensors.add_unsigned(masks.items.prefix_lens.data(), 32, {prefixes});
  to.masks.items_token_pos =
      tensors.add_unsigned(masks.items.token_pos.data(), 16, {batch.requests, masks.items.stride});
  to.cross.lens = ints(batch.cross.lens);
  to.cross.table = add_table(tensors, batch.cross.table);
  to.cross.entry_tokens = batch.cross.table.entry_tokens;
  to.linear.state_slots = ints(batch.linear.state_slots);
  to.linear.snapshot_slots = ints(batch.linear.snapshot_slots);
  to.draft_counts = ints(batch.linear.draft_counts);
  to.hints.max_q_len = batch.hints.max_q_len;
  to.hints.max_kv_len = batch.hints.max_kv_len;
  to.hints.host_q_lens = on_host(batch.hints.host_q_lens);
  to.hints.host_kv_lens = on_host(batch.hints.host_kv_lens);
  to.hints.shared_prefix = ints(batch.hints.shared_prefix);
  to.hints.prefix_written = batch.hints.prefix_written;
  return to;
}

fovea_layer_tensors to_c(const LayerTensors& layer, const AttentionSpec& spec, int64_t tokens,
                         TensorList& tensors) {
  const int64_t width = query_dim(spec, bool{layer.mla.q_rope});
  const int64_t out = spec.mla.v_dim > 0 ? spec.mla.v_dim : cached_value_dim(spec);
  const MlaWeights& weights = layer.mla.weights;
  const int64_t rank = spec.mla.kv_lora_rank;
  const auto weight = [&](const void* data, int64_t head_stride, int64_t rows) {
    return tensors.add(data, weights.dtype, {spec.q_heads, rows, rank},
                       {head_stride == 0 ? rows * rank : head_stride, rank, 1});
  };
  fovea_layer_tensors to;
  check_status(fovea_layer_tensors_init(&to, sizeof to));
  to.layer = layer.layer;
  to.q = tensors.add(layer.q, tokens, spec.q_heads, width);
  to.k = tensors.add(layer.k, tokens, spec.kv_heads, spec.head_dim);
  to.v = tensors.add(layer.v, tokens, spec.kv_heads, spec.head_dim_v);
  to.out = tensors.add(layer.out, tokens, spec.q_heads, out);
  to.lse = tensors.add(layer.lse.data, DType::f32, {tokens, spec.q_heads});
  to.q_scale = tensors.add(layer.q_scale.data, DType::f32, {tokens, spec.q_heads},
                           {layer.q_scale.token_stride, layer.q_scale.head_stride});
  to.save_kv = layer.save_kv;
  to.sinks = tensors.add(layer.scores.sinks, DType::f32, {spec.q_heads});
  to.alibi_slopes = tensors.add(layer.scores.alibi_slopes, DType::f32, {spec.q_heads});
  to.dual_q_succ = tensors.add(layer.dual_chunk.q_succ, tokens, spec.q_heads, width);
  to.dual_q_inter = tensors.add(layer.dual_chunk.q_inter, tokens, spec.q_heads, width);
  const RotaryTensors& rotary = layer.rotary;
  const int64_t positions = rotary.max_positions, half = rotary.rotary_dim / 2;
  to.rotary.cos = tensors.add(rotary.cos, DType::f32, {positions, half});
  to.rotary.sin = tensors.add(rotary.sin, DType::f32, {positions, half});
  to.rotary.positions = tensors.add(rotary.positions, DType::i32, {tokens});
  to.rotary.interleaved = rotary.interleaved;
  to.mla.latent = tensors.add(layer.mla.latent, tokens, 1, rank);
  to.mla.k_rope = tensors.add(layer.mla.k_rope, tokens, 1, spec.mla.rope_dim);
  to.mla.q_rope = tensors.add(layer.mla.q_rope, tokens, spec.q_heads, spec.mla.rope_dim);
  to.mla.w_uk = weight(weights.w_uk, weights.w_uk_head_stride, spec.mla.nope_dim);
  to.mla.w_uv = weight(weights.w_uv, weights.w_uv_head_stride, spec.mla.v_dim);
  return to;
}

BackendEntry through_c(const BackendEntry& entry, const BackendRequest& request) {
  BackendEntry wrapped = entry;
  const std::string name = entry.name;
  wrapped.create = [request, name](const BackendContext& context) {
    return std::make_unique<ThroughC>(context, request, name);
  };
  return wrapped;
}

}  // namespace fovea::test
