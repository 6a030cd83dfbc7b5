// SPDX-License-Identifier: Apache-2.0
#include "attention/backends/mla_prefill.h"

#include <algorithm>
#include <limits>

#include "attention/validate_spec.h"
#include "core/rounding.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

// A pass that could have more context than this many chunks keeps the rest of its requests
// absorbed.
constexpr int32_t kMaxChunks = 256;
int32_t key_dim(const AttentionSpec& spec) { return spec.nope_dim + spec.rope_dim; }

// Attention over keys and values of every head, packed; the rotary key once for all heads where it
// can read it so.
cuda::AttentionSetup attention_setup(const MlaKernels& kernels, const AttentionSpec& spec,
                                     const DeviceInfo& device) {
  cuda::AttentionSetup setup;
  setup.spec.kind = AttentionKind::mha;
  setup.spec.scope = AttentionScope::encoder;
  setup.spec.q_heads = setup.spec.kv_heads = spec.q_heads;
  setup.spec.head_dim = key_dim(spec);
  setup.spec.head_dim_v = spec.v_dim;
  setup.spec.q_dtype = spec.q_dtype;
  setup.sm = device.sm;
  setup.multiprocessors = device.cores;
  setup.shared_key_dims = spec.rope_dim;
  if (kernels.attention->variants(setup).empty()) setup.shared_key_dims = 0;
  return setup;
}

// Elements of what a chunk keeps of a row beside keys and values of every head: latent and rotary
// key, or, where the latent is read in its page, the key and 8 bytes for the place.
int64_t gathered_elements(const AttentionSpec& spec, bool gathers) {
  return gathers ? spec.rope_dim + 4 : spec.head_dim;
}

std::vector<gpu::KernelVariant> own_variants(const AttentionSpec& spec, DType stored, int sm) {
  const cuda::Family& family = cuda::family("portable/mla_prefill");
  const std::string type = *cuda::variant_type(spec.q_dtype);
  // Bits are moved as they are, but for codes.
  const cuda::VariantValues gather =
      is_fp8(stored) ? cuda::VariantValues{"gather", *cuda::variant_type(stored), type}
                     : cuda::VariantValues{"gather", "bf16", "bf16"};
  return {make_variant(family, {"forms", "bf16", "bf16"}, sm), make_variant(family, gather, sm),
          make_variant(family, {"add", type, type}, sm),
          make_variant(family, {"join", "bf16", "bf16"}, sm)};
}

// Blocks of kernels that go through rows. More of them than the GPU holds cost where a chunk turns
// out to be empty: to add nothing to 16384 tokens of 16 heads took 22 us (H100, 2026-11-27).
uint32_t blocks(int64_t rows, const cuda::Kernel& kernel) {
  constexpr int64_t kMost = 1024;
  return static_cast<uint32_t>(std::min(ceil_div(rows, kernel.row_tile()), kMost));
}

}  // namespace

int32_t mla_prefill_rows(const MlaKernels& kernels, const AttentionSpec& spec, DType stored,
                         const DeviceInfo& device, const BatchLimits& limits, int32_t chunk_rows) {
  // Few heads have few row tiles, and chunks of more requests fill the GPU more evenly: 16 heads,
  // 8x512 over 8k took 1894 us in chunks of 26,214 rows, 1655 in two of 52,428, 1270 where all
  // 65,536 fit one (H100, 2026-11-27).
  constexpr int64_t kMinRows = 4096, kBytes = int64_t{736} << 20;
  const int64_t width =
      key_dim(spec) + spec.v_dim - attention_setup(kernels, spec, device).shared_key_dims;
  const int64_t elements =
      spec.q_heads * width +
      gathered_elements(spec, MlaProjection::gathers(kernels, spec, stored, device));
  const int64_t row_bytes = elements * static_cast<int64_t>(dtype_bytes(spec.q_dtype));
  const int64_t wanted = chunk_rows > 0 ? chunk_rows : std::max(kBytes / row_bytes, kMinRows);
  const int64_t all = most_up_projected_rows(limits, std::numeric_limits<int32_t>::max()).all;
  return static_cast<int32_t>(std::max<int64_t>(limits.max_tokens, std::min(all, wanted)));
}

bool serves_up_projected(const AttentionSpec& spec, const BatchLimits& limits) {
  return can_up_project(spec) && std::min(limits.max_q_len, limits.max_tokens) >= kMinUpProjected;
}

std::vector<gpu::KernelVariant> MlaPrefill::variants(const MlaKernels& kernels,
                                                     const AttentionSpec& spec, DType stored,
                                                     const DeviceInfo& device) {
  std::vector<gpu::KernelVariant> needed = own_variants(spec, stored, device.sm);
  const auto add = [&](const std::vector<gpu::KernelVariant>& list) {
    needed.insert(needed.end(), list.begin(), list.end());
  };
  add(MlaProjection::variants(kernels, spec, stored, device));
  add(kernels.attention->variants(attention_setup(kernels, spec, device)));
  return needed;
}

MlaPrefillBuffers MlaPrefill::carve(WorkspaceCarver& workspace, const MlaKernels& kernels,
                                    const AttentionSpec& spec, DType stored,
                                    const DeviceInfo& device, const BatchLimits& limits,
                                    int32_t chunk_rows) {
  MlaPrefillBuffers buffers;
  buffers.rows = mla_prefill_rows(kernels, spec, stored, device, limits, chunk_rows);
  const auto rows_of = [&](int64_t width) {
    return workspace.take<std::byte>(buffers.rows * width *
                                     static_cast<int64_t>(dtype_bytes(spec.q_dtype)));
  };
  const cuda::AttentionSetup setup = attention_setup(kernels, spec, device);
  if (MlaProjection::gathers(kernels, spec, stored, device)) {
    buffers.gathered = rows_of(spec.rope_dim);
    buffers.offsets = workspace.take<int64_t>(buffers.rows);
  } else {
    buffers.gathered = rows_of(spec.head_dim);
  }
  buffers.keys = rows_of(int64_t{spec.q_heads} * (key_dim(spec) - setup.shared_key_dims));
  buffers.values = rows_of(int64_t{spec.q_heads} * spec.v_dim);
  buffers.lse = workspace.take<float>(int64_t{limits.max_tokens} * spec.q_heads);
  buffers.part_lse = workspace.take<float>(int64_t{limits.max_tokens} * spec.q_heads);
  for (std::byte*& attention : buffers.attention) {
    attention = workspace.take_bytes(kernels.attention->workspace_bytes(setup, limits)).data();
  }
  buffers.up_requests = workspace.take<uint8_t>(limits.max_requests);
  buffers.up_tokens = workspace.take<uint8_t>(limits.max_tokens);
  buffers.new_lens = workspace.take<int32_t>(limits.max_requests);
  buffers.row_indptr = workspace.take<int32_t>(int64_t{limits.max_requests} + 1);
  buffers.live_rows = workspace.take<int32_t>(1);
  buffers.chunk_begin = workspace.take<int32_t>(limits.max_requests);
  buffers.chunk_lens = workspace.take<int32_t>(limits.max_requests);
  buffers.chunk_indptr = workspace.take<int32_t>(int64_t{limits.max_requests} + 1);
  return buffers;
}

MlaPrefill::MlaPrefill(const MlaKernels& kernels, const AttentionSpec& spec,
                       const KvCacheSpec& cache, const DeviceInfo& device, gpu::KernelStore& store)
    : spec_(spec),
      cache_(cache),
      projection_(kernels, spec, cache.dtype, device, store),
      gathers_(MlaProjection::gathers(kernels, spec, cache.dtype, device)) {
  const std::vector<gpu::KernelVariant> own = own_variants(spec, cache.dtype, device.sm);
  forms_ = cuda::Kernel(own[0], store);
  gather_ = cuda::Kernel(own[1], store);
  add_ = cuda::Kernel(own[2], store);
  join_ = cuda::Kernel(own[3], store);
  const cuda::AttentionSetup attention = attention_setup(kernels, spec, device);
  shared_key_dims_ = attention.shared_key_dims;
  new_part_.attention = kernels.attention->load(attention, store);
  chunk_part_.attention = kernels.attention->load(attention, store);
}

void MlaPrefill::reserve(const BatchLimits& limits, const MlaPrefillBuffers& buffers,
                         const MlaScratch& scratch) {
  limits_ = limits;
  buffers_ = buffers;
  scratch_ = scratch;
  const int64_t latents = gathers_ ? 0 : spec_.kv_lora_rank;
  const std::byte* const rotary =
      buffers.gathered + latents * static_cast<int64_t>(dtype_bytes(spec_.q_dtype));
  for (const auto& [part, workspace] : {std::pair(&new_part_, buffers.attention[0]),
                                        std::pair(&chunk_part_, buffers.attention[1])}) {
    part->attention->reserve(limits, workspace);
    part->attention->share_keys(rotary, latents + spec_.rope_dim);
  }
}

int64_t MlaPrefill::max_context() const { return int64_t{kMaxChunks} * buffers_.rows; }

void MlaPrefill::plan(const BatchView& batch, const MlaFormBounds& bounds, Stream stream) {
  batch_ = batch;
  // Every chunk that the lengths could need is enqueued.
  at_once_ = bounds.rows.all <= buffers_.rows;
  const int64_t context = std::min(bounds.rows.context, max_context());
  chunks_ = at_once_ ? 1 : static_cast<int32_t>(ceil_div(context, int64_t{buffers_.rows}));
  cuda::MlaFormsParams params{};
  params.q_indptr = batch.q_indptr;
  params.kv_lens = batch.kv_lens;
  params.requests = batch.requests;
  params.kv_lora_rank = spec_.kv_lora_rank;
  params.nope_dim = spec_.nope_dim;
  params.v_dim = spec_.v_dim;
  params.least_q_len = bounds.least_q_len;
  params.by_q_len = bounds.by_q_len;
  params.at_once = at_once_;
  params.most_rows = at_once_ ? buffers_.rows : static_cast<int32_t>(context);
  params.up_requests = buffers_.up_requests;
  params.up_tokens = buffers_.up_tokens;
  params.new_lens = buffers_.new_lens;
  params.row_indptr = buffers_.row_indptr;
  params.chunk = chunk();
  forms_.launch_overlapped({}, params, stream);

  cuda::BatchParams part{};
  part.requests = batch.requests;
  part.q_heads = part.kv_heads = spec_.q_heads;
  part.max_q_len = bounds.max_q_len;
  new_part_.batch = chunk_part_.batch = part;
  // Absorbed requests have no keys here, and their own kernels write their rows.
  const int32_t least_kv_len = bounds.most_absorbed > 0;
  new_part_.batch.q_indptr = new_part_.begin = batch.q_indptr;
  new_part_.batch.kv_lens = buffers_.new_lens;
  new_part_.batch.mask.causal = 1;
  new_part_.batch.least_kv_len = least_kv_len;
  chunk_part_.batch.q_indptr = buffers_.chunk_indptr;
  chunk_part_.batch.kv_lens = buffers_.chunk_lens;
  chunk_part_.batch.mask.causal = at_once_;
  if (at_once_) chunk_part_.batch.least_kv_len = least_kv_len;  // else `add` wants all rows
  chunk_part_.begin = buffers_.chunk_begin;
  new_part_.attention->expect_keys(false, bounds.max_q_len, bounds.requests);
  chunk_part_.attention->expect_keys(false, std::min(bounds.max_kv_len, buffers_.rows),
                                     bounds.requests);
  if (!at_once_) plan_part(new_part_, stream);
  if (chunks_ == 1) plan_part(chunk_part_, stream);
}

void MlaPrefill::plan_part(const Part& part, Stream stream) const {
  cuda::PassPlan pass({});
  part.attention->plan(part.batch, batch_.tokens, pass);
  pass.launch(nullptr, stream);
}

cuda::MlaChunk MlaPrefill::chunk() const {
  return {.live_rows = buffers_.live_rows,
          .begin = buffers_.chunk_begin,
          .lens = buffers_.chunk_lens,
          .indptr = buffers_.chunk_indptr,
          .most_rows = buffers_.rows};
}

void MlaPrefill::attend(const LayerTensors& tensors, const cuda::MlaDecodeTensors& cache,
                        Stream stream) {
  const HeadRows q = joined_queries(tensors, stream);
  cuda::MlaGatherParams rows{};
  rows.cache = cache.cache;
  rows.page_stride = cache.page_stride;
  rows.token_stride = cache.token_stride;
  rows.page_table = cache.page_table;
  rows.page_table_stride = cache.page_table_stride;
  rows.page_size = cache_.page_size;
  rows.fp8_rows = cache_.layout == KvLayout::mla_fp8_rows;
  rows.scale = cache.cache_scale;
  rows.scale_slot_stride = cache_.scale == KvScale::per_token_head ? 1 : 0;
  rows.q_indptr = batch_.q_indptr;
  rows.kv_lens = batch_.kv_lens;
  rows.requests = batch_.requests;
  rows.up_requests = buffers_.up_requests;
  rows.kv_lora_rank = spec_.kv_lora_rank;
  rows.rope_dim = spec_.rope_dim;
  rows.nope_dim = spec_.nope_dim;
  rows.heads = spec_.q_heads;
  rows.rows = buffers_.gathered;
  rows.offsets = buffers_.offsets;
  rows.keys = shared_key_dims_ > 0 ? nullptr : buffers_.keys;
  float* const lse = tensors.lse ? tensors.lse.data : buffers_.lse;
  if (!at_once_) {
    rows.row_indptr = batch_.q_indptr;
    rows.most_rows = batch_.tokens;
    gather_.launch_overlapped({blocks(rows.most_rows, gather_)}, rows, stream);
    project(tensors.mla_weights, cache, batch_.q_indptr + batch_.requests, batch_.tokens, stream);
    run(new_part_, q, tensors.out, lse, batch_.tokens, stream);
  }

  rows.row_indptr = buffers_.row_indptr;
  rows.of_chunk = 1;
  rows.most_rows = buffers_.rows;
  rows.chunk = chunk();
  const HeadRows part = dense_rows(scratch_.results, spec_.q_dtype, spec_.q_heads, spec_.v_dim);
  cuda::MlaAddParams add{};
  add.out = tensors.out.data;
  add.out_token_stride = tensors.out.token_stride;
  add.out_head_stride = tensors.out.head_stride;
  add.lse = lse;
  add.part = part.data;
  add.part_token_stride = part.token_stride;
  add.part_head_stride = part.head_stride;
  add.part_lse = buffers_.part_lse;
  add.live_rows = buffers_.live_rows;
  add.q_indptr = batch_.q_indptr;
  add.requests = batch_.requests;
  add.tokens = batch_.tokens;
  add.heads = spec_.q_heads;
  add.v_dim = spec_.v_dim;
  for (int32_t chunk = 0; chunk < chunks_; ++chunk) {
    rows.first_row = chunk * buffers_.rows;
    gather_.launch_overlapped({blocks(rows.most_rows, gather_)}, rows, stream);
    project(tensors.mla_weights, cache, buffers_.live_rows, buffers_.rows, stream);
    if (chunks_ > 1) plan_part(chunk_part_, stream);
    if (at_once_) {
      run(chunk_part_, q, tensors.out, lse, buffers_.rows, stream);
      return;
    }
    run(chunk_part_, q, part, buffers_.part_lse, buffers_.rows, stream);
    add_.launch_overlapped({blocks(int64_t{batch_.tokens} * spec_.q_heads, add_)}, add, stream);
  }
}

// Attention reads a query as one row.
HeadRows MlaPrefill::joined_queries(const LayerTensors& tensors, Stream stream) const {
  if (!tensors.q_rope) return tensors.q;
  cuda::MlaJoinParams params{};
  params.nope = tensors.q.data;
  params.nope_token_stride = tensors.q.token_stride;
  params.nope_head_stride = tensors.q.head_stride;
  params.rope = tensors.q_rope.data;
  params.rope_token_stride = tensors.q_rope.token_stride;
  params.rope_head_stride = tensors.q_rope.head_stride;
  params.out = scratch_.queries;
  params.tokens = batch_.tokens;
  params.heads = spec_.q_heads;
  params.nope_dim = spec_.nope_dim;
  params.rope_dim = spec_.rope_dim;
  join_.launch_overlapped({blocks(int64_t{batch_.tokens} * spec_.q_heads, join_)}, params, stream);
  return dense_rows(scratch_.queries, spec_.q_dtype, spec_.q_heads, key_dim(spec_));
}

// keys = latents W_UK, values = latents W_UV; rotary keys are there already
void MlaPrefill::project(const MlaWeights& given, const cuda::MlaDecodeTensors& cache,
                         const int32_t* live_rows, int32_t rows, Stream stream) const {
  const MlaWeights weights = with_head_strides(given, spec_);
  const int32_t heads = spec_.q_heads;
  const int64_t key_width = key_dim(spec_) - shared_key_dims_;
  projection_.run({.latents = gathers_ ? cache.cache : buffers_.gathered,
                   .latents_row_stride = spec_.head_dim,
                   .offsets = buffers_.offsets,
                   .w_uk = weights.w_uk,
                   .w_uv = weights.w_uv,
                   .w_uk_head_stride = weights.w_uk_head_stride,
                   .w_uv_head_stride = weights.w_uv_head_stride,
                   .keys = buffers_.keys,
                   .keys_token_stride = key_width * heads,
                   .keys_head_stride = key_width,
                   .values = buffers_.values,
                   .values_token_stride = int64_t{spec_.v_dim} * heads,
                   .values_head_stride = spec_.v_dim,
                   .live_rows = live_rows,
                   .rows = rows},
                  stream);
}

void MlaPrefill::run(const Part& part, const HeadRows& q, const HeadRows& out, float* lse,
                     int32_t rows, Stream stream) {
  cuda::AttentionParams params{};
  params.batch = part.batch;
  params.keys.k = buffers_.keys;
  params.keys.v = buffers_.values;
  params.keys.k_head_stride = key_dim(spec_) - shared_key_dims_;
  params.keys.k_token_stride = params.keys.k_head_stride * spec_.q_heads;
  params.keys.v_head_stride = spec_.v_dim;
  params.keys.v_token_stride = int64_t{spec_.v_dim} * spec_.q_heads;
  params.keys.k_page_stride = rows * params.keys.k_token_stride;
  params.keys.v_page_stride = rows * params.keys.v_token_stride;
  params.keys.page_size = 1;
  params.keys.kv_indptr = part.begin;
  params.q = q.data;
  params.q_token_stride = q.token_stride;
  params.q_head_stride = q.head_stride;
  params.out = out.data;
  params.out_token_stride = out.token_stride;
  params.out_head_stride = out.head_stride;
  params.lse = lse;
  params.head_dim = key_dim(spec_);
  params.head_dim_v = spec_.v_dim;
  params.scale = softmax_scale(spec_);
  part.attention->attend(params, 0, stream);
}

}  // namespace fovea
