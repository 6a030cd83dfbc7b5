// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/mla_up_projected.h"

#include <algorithm>

#include "attention/row_views.h"
#include "attention/validate/spec.h"
#include "core/rounding.h"
#include "kernels/cuda/attention_kernel.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

// A pass that could have more context than this many chunks keeps its other requests absorbed.
constexpr int32_t kMaxChunks = 256;

}  // namespace

bool serves_up_projected(const AttentionSpec& spec, const BatchLimits& limits) {
  return can_up_project(spec) && std::min(limits.max_q_len, limits.max_tokens) >= kMinUpProjected;
}

std::vector<gpu::KernelVariant> CudaUpProjectedMla::variants(const MlaKernels& kernels,
                                                             const AttentionSpec& spec,
                                                             DType stored,
                                                             const DeviceInfo& device) {
  std::vector<gpu::KernelVariant> needed =
      cuda::MlaPrefillSteps::variants(stored, spec.q_dtype, device.sm);
  needed.push_back(cuda::merge_states_variant(spec.q_dtype, device.sm));
  const auto add = [&](const std::vector<gpu::KernelVariant>& list) {
    needed.insert(needed.end(), list.begin(), list.end());
  };
  add(MlaProjection::variants(kernels, spec, stored, device));
  add(kernels.attention->variants(up_projected_attention(kernels, spec, device)));
  return needed;
}

CudaUpProjectedMla::CudaUpProjectedMla(const MlaKernels& kernels, const AttentionSpec& spec,
                                       const KvCacheSpec& cache, const DeviceInfo& device,
                                       gpu::KernelStore& store)
    : spec_(spec),
      cache_(cache),
      steps_(cache.dtype, spec.q_dtype, device.sm, store),
      merge_(spec.q_dtype, device.sm, store),
      projection_(kernels, spec, cache.dtype, device, store),
      gathers_(MlaProjection::gathers(kernels, spec, cache.dtype, device)) {
  const cuda::AttentionSetup attention = up_projected_attention(kernels, spec, device);
  shared_key_dims_ = attention.shared_key_dims;
  copies_rotary_ = gathers_ && shared_key_dims_ > 0;
  new_part_.attention = kernels.attention->load(attention, store);
  chunk_part_.attention = kernels.attention->load(attention, store);
}

void CudaUpProjectedMla::reserve(const BatchLimits& limits, const UpProjectedBuffers& buffers,
                                 const MlaScratch& scratch) {
  buffers_ = buffers;
  scratch_ = scratch;
  const int64_t latents = gathers_ ? 0 : spec_.mla.kv_lora_rank;
  const std::byte* const rotary =
      buffers.gathered + latents * static_cast<int64_t>(dtype_bytes(spec_.q_dtype));
  for (const auto& [part, workspace] : {std::pair(&new_part_, buffers.attention[0]),
                                        std::pair(&chunk_part_, buffers.attention[1])}) {
    part->attention->reserve(limits, workspace);
    part->shared_keys = {rotary, latents + spec_.mla.rope_dim};
  }
}

int64_t CudaUpProjectedMla::max_context() const {
  return std::min<int64_t>(int64_t{kMaxChunks} * buffers_.room.rows, INT32_MAX);
}

int32_t CudaUpProjectedMla::rows_for(int32_t heads) const {
  const UpProjectedRoom& room = buffers_.room;
  return static_cast<int32_t>(std::min<int64_t>(room.rows, room.head_rows / heads));
}

int32_t CudaUpProjectedMla::heads_for(int64_t rows) const {
  const int64_t wanted = std::min<int64_t>(rows, buffers_.room.rows);
  int32_t heads = heads_;
  while (heads > 1 && (heads_ % heads != 0 || rows_for(heads) < wanted)) --heads;
  return heads;
}

void CudaUpProjectedMla::plan(const BatchView& batch, const MlaFormBounds& bounds, int32_t heads,
                              gpu::Launcher launcher) {
  batch_ = batch;
  heads_ = heads;
  new_part_.heads = heads_for(batch.tokens);
  new_part_.rows = batch.tokens;
  chunk_part_.heads = heads_for(bounds.rows.all);
  const int32_t room = rows_for(chunk_part_.heads);
  at_once_ = bounds.rows.all <= room;
  chunk_part_.rows = at_once_ ? static_cast<int32_t>(bounds.rows.all) : room;
  // Every chunk that the lengths could need is launched.
  const int64_t context = std::min(bounds.rows.context, max_context());
  chunks_ = at_once_ ? 1 : static_cast<int32_t>(ceil_div(context, int64_t{chunk_part_.rows}));
  cuda::MlaFormsParams params{};
  params.q_indptr = batch.q_indptr.data();
  params.kv_lens = batch.kv_lens.data();
  params.requests = batch.requests;
  params.kv_lora_rank = spec_.mla.kv_lora_rank;
  params.nope_dim = spec_.mla.nope_dim;
  params.v_dim = spec_.mla.v_dim;
  params.min_q_len = bounds.min_q_len;
  params.by_q_len = bounds.by_q_len;
  params.at_once = at_once_;
  params.max_rows = at_once_ ? chunk_part_.rows : static_cast<int32_t>(context);
  params.up_requests = buffers_.up_requests;
  params.up_tokens = buffers_.up_tokens;
  params.new_lens = buffers_.new_lens;
  params.row_indptr = buffers_.row_indptr;
  params.chunk = chunk();
  steps_.choose_forms(params, launcher);

  cuda::BatchParams part{};
  part.requests = batch.requests;
  part.max_q_len = bounds.max_q_len;
  // Requests without keys have no rows here: absorbed requests, whose own kernels write their rows,
  // and in a chunk requests whose context is in other chunks.
  part.min_kv_len = 1;
  for (Part* of : {&new_part_, &chunk_part_}) {
    of->batch = part;
    of->batch.q_heads = of->batch.kv_heads = of->heads;
  }
  new_part_.live_rows = batch.q_indptr.data() + batch.requests;
  new_part_.batch.q_indptr = new_part_.begin = batch.q_indptr.data();
  new_part_.batch.kv_lens = buffers_.new_lens;
  new_part_.batch.mask.causal = 1;
  chunk_part_.live_rows = buffers_.live_rows;
  chunk_part_.batch.q_indptr = buffers_.chunk_indptr;
  chunk_part_.batch.kv_lens = buffers_.chunk_lens;
  chunk_part_.batch.mask.causal = at_once_;
  chunk_part_.begin = buffers_.chunk_begin;
  // sm90/mla_project, directly before attention, copies the rotary keys.
  new_part_.keys = {
      .max_kv_len = bounds.max_q_len, .requests = bounds.requests, .written_last = copies_rotary_};
  chunk_part_.keys = {.max_kv_len = std::min(bounds.max_kv_len, chunk_part_.rows),
                      .requests = bounds.requests,
                      .written_last = copies_rotary_};
  if (!at_once_) plan_part(new_part_, launcher);
  if (chunks_ == 1) plan_part(chunk_part_, launcher);
}

void CudaUpProjectedMla::plan_part(const Part& part, gpu::Launcher launcher) const {
  cuda::PlanQueue plans({});
  part.attention->plan({.batch = part.batch,
                        .tokens = batch_.tokens,
                        .keys = part.keys,
                        .shared_keys = part.shared_keys},
                       plans);
  plans.launch(nullptr, launcher);
}

cuda::MlaChunk CudaUpProjectedMla::chunk() const {
  return {.live_rows = buffers_.live_rows,
          .begin = buffers_.chunk_begin,
          .lens = buffers_.chunk_lens,
          .indptr = buffers_.chunk_indptr,
          .max_rows = chunk_part_.rows};
}

cuda::MlaGatherParams CudaUpProjectedMla::gather_params(const Part& part,
                                                        const cuda::MlaDecodeTensors& cache) const {
  cuda::MlaGatherParams rows{};
  rows.cache = cache.cache;
  rows.page_stride = cache.page_stride;
  rows.token_stride = cache.token_stride;
  rows.page_table = cache.page_table.pages;
  rows.page_table_stride = cache.page_table.stride;
  rows.page_size = cache_.page_size;
  rows.fp8_rows = cache_.layout == KvLayout::mla_fp8_rows;
  rows.scale = cache.cache_scale;
  rows.scale_slot_stride = cache_.scale == KvScale::per_token_head ? 1 : 0;
  rows.q_indptr = batch_.q_indptr.data();
  rows.kv_lens = batch_.kv_lens.data();
  rows.requests = batch_.requests;
  rows.of_chunk = &part == &chunk_part_;
  rows.row_indptr = rows.of_chunk ? buffers_.row_indptr : batch_.q_indptr.data();
  rows.up_requests = buffers_.up_requests;
  rows.max_rows = part.rows;
  rows.kv_lora_rank = spec_.mla.kv_lora_rank;
  rows.rope_dim = spec_.mla.rope_dim;
  rows.nope_dim = spec_.mla.nope_dim;
  rows.heads = part.heads;
  rows.rows = buffers_.gathered;
  rows.offsets = buffers_.offsets;
  rows.keys = shared_key_dims_ > 0 ? nullptr : buffers_.keys;
  rows.chunk = chunk();
  return rows;
}

void CudaUpProjectedMla::locate(const cuda::MlaDecodeTensors& cache, gpu::Launcher launcher) const {
  if (located()) steps_.gather(gather_params(chunk_part_, cache), launcher);
}

void CudaUpProjectedMla::attend(const LayerTensors& tensors, const cuda::MlaDecodeTensors& cache,
                                gpu::Launcher launcher) {
  const HeadRows q = joined_queries(tensors, launcher);
  const Result result = {tensors.out, tensors.lse ? tensors.lse.data : buffers_.lse};
  cuda::MlaGatherParams rows = gather_params(chunk_part_, cache);
  if (at_once_) {
    if (!located()) steps_.gather(rows, launcher);
    attend_rows(chunk_part_, tensors, cache.cache, q, result, launcher);
    return;
  }
  steps_.gather(gather_params(new_part_, cache), launcher);
  attend_rows(new_part_, tensors, cache.cache, q, result, launcher);

  const Result part = {dense_rows(scratch_.results, spec_.q_dtype, heads_, spec_.mla.v_dim),
                       buffers_.part_lse};
  rows.part_lse = part.lse;
  rows.part_rows = int64_t{batch_.tokens} * heads_;
  cuda::MergeStatesParams add{};
  add.out = result.out.data;
  add.out_token_stride = result.out.token_stride;
  add.out_head_stride = result.out.head_stride;
  add.lse = result.lse;
  add.part = part.out.data;
  add.part_token_stride = part.out.token_stride;
  add.part_head_stride = part.out.head_stride;
  add.part_lse = part.lse;
  add.live_rows = buffers_.live_rows;
  add.q_indptr = batch_.q_indptr.data();
  add.requests = batch_.requests;
  add.tokens = batch_.tokens;
  add.heads = heads_;
  add.v_dim = spec_.mla.v_dim;
  for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
    rows.first_row = chunk * chunk_part_.rows;
    steps_.gather(rows, launcher);
    if (chunks_ > 1) plan_part(chunk_part_, launcher);
    attend_rows(chunk_part_, tensors, cache.cache, q, part, launcher);
    merge_.run_overlapped(add, launcher);
  }
}

// Attention reads a query as one row.
HeadRows CudaUpProjectedMla::joined_queries(const LayerTensors& tensors,
                                            gpu::Launcher launcher) const {
  if (!tensors.mla.q_rope) return tensors.q;
  cuda::MlaJoinParams params{};
  params.nope = tensors.q.data;
  params.nope_token_stride = tensors.q.token_stride;
  params.nope_head_stride = tensors.q.head_stride;
  params.rope = tensors.mla.q_rope.data;
  params.rope_token_stride = tensors.mla.q_rope.token_stride;
  params.rope_head_stride = tensors.mla.q_rope.head_stride;
  params.out = scratch_.queries;
  params.tokens = batch_.tokens;
  params.heads = heads_;
  params.nope_dim = spec_.mla.nope_dim;
  params.rope_dim = spec_.mla.rope_dim;
  steps_.join_queries(params, launcher);
  return dense_rows(scratch_.queries, spec_.q_dtype, heads_, key_dim(spec_));
}

void CudaUpProjectedMla::attend_rows(const Part& part, const LayerTensors& tensors,
                                     const void* cache, const HeadRows& q, const Result& result,
                                     gpu::Launcher launcher) {
  const MlaWeights weights = with_head_strides(tensors.mla.weights, spec_);
  for (int32_t head = 0; head < heads_; head += part.heads) {
    project(part, from_head(weights, head), cache, head == 0, launcher);
    run(part, from_head(q, head), {from_head(result.out, head), result.lse + head}, launcher);
  }
}

// keys = latents W_UK, values = latents W_UV. Rotary keys are copied with the first heads, if
// gather() has not copied them.
void CudaUpProjectedMla::project(const Part& part, const MlaWeights& weights, const void* cache,
                                 bool first, gpu::Launcher launcher) const {
  const int64_t key_width = key_dim(spec_) - shared_key_dims_;
  projection_.run({.latents = gathers_ ? cache : buffers_.gathered,
                   .latents_row_stride = spec_.mla.row_dim(),
                   .offsets = buffers_.offsets,
                   .rotary = first && copies_rotary_ ? buffers_.gathered : nullptr,
                   .rope_dim = spec_.mla.rope_dim,
                   .w_uk = weights.w_uk,
                   .w_uv = weights.w_uv,
                   .w_uk_head_stride = weights.w_uk_head_stride,
                   .w_uv_head_stride = weights.w_uv_head_stride,
                   .keys = buffers_.keys,
                   .keys_token_stride = key_width * part.heads,
                   .keys_head_stride = key_width,
                   .values = buffers_.values,
                   .values_token_stride = int64_t{spec_.mla.v_dim} * part.heads,
                   .values_head_stride = spec_.mla.v_dim,
                   .live_rows = part.live_rows,
                   .rows = part.rows,
                   .heads = part.heads},
                  launcher);
}

void CudaUpProjectedMla::run(const Part& part, const HeadRows& q, const Result& result,
                             gpu::Launcher launcher) {
  cuda::AttentionParams params{};
  params.batch = part.batch;
  params.keys.k = buffers_.keys;
  params.keys.v = buffers_.values;
  params.keys.k_head_stride = key_dim(spec_) - shared_key_dims_;
  params.keys.k_token_stride = params.keys.k_head_stride * part.heads;
  params.keys.v_head_stride = spec_.mla.v_dim;
  params.keys.v_token_stride = int64_t{spec_.mla.v_dim} * part.heads;
  params.keys.k_page_stride = part.rows * params.keys.k_token_stride;
  params.keys.v_page_stride = part.rows * params.keys.v_token_stride;
  params.keys.page_size = 1;
  params.keys.kv_indptr = part.begin;
  params.q = q.data;
  params.q_token_stride = q.token_stride;
  params.q_head_stride = q.head_stride;
  params.out = result.out.data;
  params.out_token_stride = result.out.token_stride;
  params.out_head_stride = result.out.head_stride;
  params.lse = result.lse;
  params.lse_token_stride = heads_;
  params.head_dim = key_dim(spec_);
  params.head_dim_v = spec_.mla.v_dim;
  params.scale = softmax_scale(spec_);
  part.attention->attend(params, 0, launcher);
}

}  // namespace fovea
