// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <string>

#include "core/check.h"
#include "core/workspace_carver.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/mla_decode.h"
#include "kernels/mla_row.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kTileRows = 64;
constexpr int32_t kTileKeys = 64;
constexpr int32_t kColumns = 64;  // of a box: a swizzled row of 128 bytes
// Smaller pages are copied row by row: 64 requests of 4k keys take 155 us so, in boxes of 16 rows
// 179 (2026-11-21).
constexpr int32_t kLeastBoxKeys = 32;
constexpr uint32_t kMergeBlocksPerSm = 2;

// Query rows of a block, and blocks that share a request's keys.
int32_t block_rows(const MlaDecodeSetup& setup) {
  const int64_t rows = int64_t{setup.max_q_len} * setup.q_heads;
  // Products of another shape round in another way.
  if (setup.batch_invariant) return kTileRows;
  return rows <= 16 ? 16 : rows <= 32 ? 32 : kTileRows;
}
int32_t row_blocks(const MlaDecodeSetup& setup) {
  return int64_t{setup.max_q_len} * setup.q_heads > kTileRows ? 2 : 1;
}
int32_t workers(const MlaDecodeSetup& setup) {
  return std::min(setup.multiprocessors / row_blocks(setup), kMlaMaxWorkers);
}
bool loads_pages(const MlaDecodeSetup& setup) {
  return setup.cache == MlaCache::as_queries &&
         (setup.page_size % kTileKeys == 0 ||
          (kTileKeys % setup.page_size == 0 && setup.page_size >= kLeastBoxKeys));
}
// Elements of the cache, as strides count them.
int64_t element_bytes(const MlaDecodeSetup& setup) {
  return setup.cache == MlaCache::as_queries ? sizeof(uint16_t) : 1;
}

void check_setup(const MlaDecodeSetup& setup) {
  check_argument(setup.sm == 90, "sm is {}, mla_decode needs 90", setup.sm);
  check_argument(setup.dtype == DType::bf16 || setup.dtype == DType::f16,
                 "dtype is {}, accepted: bf16, f16", dtype_name(setup.dtype));
  check_argument(setup.rank == 512 || setup.rank == 256, "rank is {}, accepted: 512, 256",
                 setup.rank);
  check_argument(setup.rope == 64 || setup.rope == 0, "rope is {}, accepted: 64, 0", setup.rope);
  check_argument(setup.cache == MlaCache::as_queries || setup.dtype == DType::bf16,
                 "dtype is {}, fp8 caches take bf16 queries", dtype_name(setup.dtype));
  check_argument(setup.cache != MlaCache::fp8_rows ||
                     (setup.rank == kMlaRowLatent && setup.rope == kMlaRowRope),
                 "rank, rope are {}, {}: fp8_rows hold {}, {}", setup.rank, setup.rope,
                 kMlaRowLatent, kMlaRowRope);
  check_argument(setup.q_heads > 0, "q_heads is {}, at least 1", setup.q_heads);
  check_argument(setup.page_size > 0, "page_size is {}, at least 1", setup.page_size);
  check_argument(setup.multiprocessors > 1, "multiprocessors is {}, at least 2",
                 setup.multiprocessors);
}

MlaWorkList carve(WorkspaceCarver& workspace, const MlaDecodeSetup& setup,
                  const BatchLimits& limits) {
  const int64_t rows = MlaDecode::row_tile(setup);
  // Every request with rows adds less than one tile to the batch's rows / row_tile.
  const int64_t filled = std::min(limits.max_requests, limits.max_tokens);
  const int64_t tiles = (int64_t{limits.max_tokens} * setup.q_heads + filled * (rows - 1)) / rows;
  MlaWorkList work{};
  work.workers = workers(setup);
  work.items = workspace.take<MlaItem>(tiles + work.workers);
  work.ranges = workspace.take<MlaRange>(work.workers);
  work.merges = workspace.take<MlaMerge>(work.workers);
  work.partial_out = workspace.take<float>(2 * work.workers * rows * setup.rank);
  work.partial_lse = workspace.take<float>(2 * work.workers * rows);
  return work;
}

gpu::KernelVariant variant(const char* folder, const VariantValues& values,
                           const MlaDecodeSetup& setup) {
  return make_variant(family(folder), values, setup.sm);
}

uint64_t bytes(int64_t elements) { return static_cast<uint64_t>(elements) * sizeof(uint16_t); }

void encode_queries(const MlaDecodeSetup& setup, const void* data, int32_t columns, int64_t tokens,
                    int64_t token_stride, int64_t head_stride, TensorMap& map) {
  const auto heads = static_cast<uint64_t>(setup.q_heads);
  gpu::encode_tensor_map(
      {.data = data,
       .rank = 3,
       .sizes = {static_cast<uint64_t>(columns), heads, static_cast<uint64_t>(tokens)},
       .strides = {bytes(head_stride), bytes(token_stride)},
       .box = {kColumns, static_cast<uint32_t>(std::gcd(setup.q_heads, block_rows(setup))), 1}},
      &map);
}

}  // namespace

int32_t MlaDecode::row_tile(const MlaDecodeSetup& setup) {
  return block_rows(setup) * row_blocks(setup);
}

std::vector<gpu::KernelVariant> MlaDecode::variants(const MlaDecodeSetup& setup) {
  check_setup(setup);
  const std::string rows = std::to_string(row_tile(setup));
  const std::string rank = std::to_string(setup.rank);
  const std::string type = *variant_type(setup.dtype);
  const bool fp8 = setup.cache != MlaCache::as_queries;
  const char* loader = loads_pages(setup)                  ? "pages"
                       : setup.cache == MlaCache::fp8_rows ? "scaled"
                                                           : "rows";
  return {
      variant("sm90/mla_plan", {rows}, setup),
      variant("sm90/mla_decode",
              {rank, std::to_string(setup.rope), type, fp8 ? *variant_type(DType::f8e4m3) : type,
               loader, std::to_string(block_rows(setup)), std::to_string(row_blocks(setup))},
              setup),
      variant("sm90/mla_merge", {rows, rank, type}, setup)};
}

MlaDecode::MlaDecode(const MlaDecodeSetup& setup, gpu::KernelStore& store) : setup_(setup) {
  const std::vector<gpu::KernelVariant> needed = variants(setup);
  plan_ = Kernel(needed[0], store);
  decode_ = Kernel(needed[1], store);
  merge_ = Kernel(needed[2], store);
}

size_t MlaDecode::workspace_bytes(const MlaDecodeSetup& setup, const BatchLimits& limits) {
  check_setup(setup);
  WorkspaceCarver counter(nullptr);
  carve(counter, setup, limits);
  return counter.bytes();
}

void MlaDecode::reserve(const BatchLimits& limits, std::byte* workspace) {
  WorkspaceCarver carver(workspace);
  work_ = carve(carver, setup_, limits);
}

void MlaDecode::plan(const BatchParams& batch, Stream stream, const uint8_t* skip) {
  check_argument(work_.items != nullptr, "plan() before reserve()");
  batch_ = batch;
  plan_.launch({1}, MlaPlanParams{batch, skip, work_, setup_.batch_invariant}, stream);
}

void MlaDecode::decode(const MlaDecodeTensors& tensors, Stream stream) const {
  check_argument(work_.items != nullptr, "decode() before reserve()");
  if (batch_.requests == 0 || tensors.tokens == 0) return;
  MlaDecodeParams params{};
  if (loads_pages(setup_)) {
    params.box_keys = std::min(setup_.page_size, kTileKeys);
    gpu::encode_tensor_map(
        {.data = tensors.cache,
         .rank = 4,
         .sizes = {kColumns, static_cast<uint64_t>(setup_.page_size),
                   static_cast<uint64_t>((setup_.rank + setup_.rope) / kColumns),
                   static_cast<uint64_t>(tensors.pages)},
         .strides = {bytes(tensors.token_stride), bytes(kColumns), bytes(tensors.page_stride)},
         .box = {kColumns, static_cast<uint32_t>(params.box_keys), 1, 1}},
        &params.cache_map);
  }
  encode_queries(setup_, tensors.q_latent, setup_.rank, tensors.tokens,
                 tensors.q_latent_token_stride, tensors.q_latent_head_stride, params.q_latent_map);
  if (setup_.rope > 0) {
    encode_queries(setup_, tensors.q_rope, setup_.rope, tensors.tokens, tensors.q_rope_token_stride,
                   tensors.q_rope_head_stride, params.q_rope_map);
  }
  params.batch = batch_;
  params.cache = tensors.cache;
  params.page_stride = tensors.page_stride * element_bytes(setup_);
  params.token_stride = tensors.token_stride * element_bytes(setup_);
  params.cache_scale = tensors.cache_scale;
  params.page_table = tensors.page_table;
  params.page_table_stride = tensors.page_table_stride;
  params.page_size = setup_.page_size;
  params.q_box_rows = std::gcd(setup_.q_heads, block_rows(setup_));
  params.out = tensors.out;
  params.out_token_stride = tensors.out_token_stride;
  params.out_head_stride = tensors.out_head_stride;
  params.lse = tensors.lse;
  params.scale = tensors.scale;
  params.work = work_;
  const auto blocks = static_cast<uint32_t>(work_.workers * row_blocks(setup_));
  decode_.launch_overlapped({blocks}, params, stream);
  if (setup_.batch_invariant) return;
  merge_.launch_overlapped({kMergeBlocksPerSm * static_cast<uint32_t>(setup_.multiprocessors)},
                           MlaMergeParams{work_, tensors.out, tensors.out_token_stride,
                                          tensors.out_head_stride, tensors.lse, setup_.q_heads},
                           stream);
}

}  // namespace fovea::kernels::cuda
