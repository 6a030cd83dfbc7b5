// SPDX-License-Identifier: Apache-2.0
#include "support/kernel_problem.h"

#include "support/cases.h"

namespace fovea::test {

std::vector<AttentionCase> kernel_cases() {
  std::vector<AttentionCase> cases = attention_cases();
  std::erase_if(cases, [](const AttentionCase& test) {
    return has_mla_weights(test.spec) || test.spec.has_rope || test.spec.dual_chunk;
  });
  return cases;
}

KernelProblem::KernelProblem(const AttentionCase& test, const CaseData& data, Fill fill)
    : test_(test) {
  if (is_cached(test.spec)) store_.emplace(test, data, fill);
  batch_.emplace(test, data, store_ ? &*store_ : nullptr, whole_case(test), fill);
  const int32_t page_size = test.cache.page_size;
  for (const RequestData& request : data.requests) kv_lens_.push_back(request.kv_len);
  if (!store_) return;
  // One row per request, as wide as the request table; entries past a request's pages are wild.
  const auto stride = static_cast<size_t>(store_->table_stride());
  page_table_ = index_array(data.requests.size() * stride, fill);
  const std::span<const int64_t> slot_map = store_->pool().slot_map();
  for (size_t index = 0; index < data.requests.size(); ++index) {
    for (int32_t token = 0; token < data.requests[index].kv_len; ++token) {
      int64_t slot = store_->slot(index, token);
      if (!slot_map.empty()) slot = slot_map[static_cast<size_t>(slot)];
      // A page that has left the window keeps its wild entry: all its keys are hidden.
      if (slot < 0) continue;
      page_table_[index * stride + static_cast<size_t>(token / page_size)] =
          static_cast<int32_t>(slot / page_size);
    }
  }
}

std::optional<kernels::KvWriteParams> KernelProblem::write_params() {
  const LayerTensors tensors = batch_->tensors();
  const bool mla = is_mla(test_.spec);
  const HeadRows& k = mla ? tensors.mla.latent : tensors.k;
  if (!store_ || !tensors.save_kv || !k) return std::nullopt;
  kernels::KvWriteParams params;
  params.cache = store_->pool().layer(tensors.layer);
  params.k = k;
  params.v = mla ? tensors.mla.k_rope : tensors.v;
  params.slots = batch_->view().out_slots.data();
  if (!store_->pool().slot_map().empty()) params.slot_map = store_->pool().slot_map().data();
  params.tokens = batch_->view().tokens;
  params.kv_heads = test_.spec.kv_heads;
  params.head_dim = k_width(test_.spec);
  params.head_dim_v = v_width(test_.spec);
  return params;
}

kernels::AttentionParams KernelProblem::attention_params() {
  const AttentionSpec& spec = test_.spec;
  const BatchView view = batch_->view();
  const LayerTensors tensors = batch_->tensors();
  kernels::AttentionParams params;
  params.q = tensors.q;
  params.q_scale = tensors.q_scale;
  params.q_rope = tensors.mla.q_rope;
  params.q_split_dim = test_.split_q ? spec.mla.kv_lora_rank : 0;
  if (store_) {
    params.keys.cache = store_->pool().layer(tensors.layer);
    params.keys.page_table = page_table_.data();
    params.keys.page_table_stride = store_->table_stride();
  } else {
    params.keys.k = tensors.k;
    params.keys.v = tensors.v;
    params.keys.kv_indptr = view.q_indptr.data();
  }
  params.out = tensors.out;
  params.lse = tensors.lse.data;
  params.requests = view.requests;
  params.q_indptr = view.q_indptr.data();
  params.kv_lens = kv_lens_.data();
  params.q_heads = spec.q_heads;
  params.kv_heads = spec.kv_heads;
  params.head_dim = cached_key_dim(spec);
  params.head_dim_v = cached_value_dim(spec);
  params.scale = static_cast<float>(softmax_scale(spec));
  params.logit_cap = spec.scores.logit_cap;
  params.sinks = tensors.scores.sinks;
  params.alibi_slopes = tensors.scores.alibi_slopes;

  kernels::AttentionMask& mask = params.mask;
  mask.causal = is_causal(spec.scope);
  mask.window = spec.window;
  mask.chunk = spec.chunk;
  mask.positions = view.positions.data();
  mask.tree = view.masks.tree.ancestors.data();
  mask.custom = view.masks.custom.visible.data();
  mask.custom_indptr = view.masks.custom.indptr.data();
  mask.spans = view.masks.spans.bounds.data();
  mask.span_indptr = view.masks.spans.indptr.data();
  mask.item_prefix_lens = view.masks.items.prefix_lens.data();
  mask.token_pos_in_items = view.masks.items.token_pos.data();
  mask.token_pos_in_items_stride = view.masks.items.stride;
  return params;
}

}  // namespace fovea::test
