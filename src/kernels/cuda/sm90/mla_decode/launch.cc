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

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kTileRows = 64;
constexpr int32_t kColumns = 64;      // of a box: a swizzled row of 128 bytes
constexpr int32_t kLeastBoxKeys = 8;  // rows of one period of the swizzle
constexpr uint32_t kMergeBlocksPerSm = 2;

// Blocks that share a request's keys.
int32_t row_blocks(const MlaDecodeSetup& setup) {
  return int64_t{setup.max_q_len} * setup.q_heads > kTileRows ? 2 : 1;
}
int32_t workers(const MlaDecodeSetup& setup) {
  return std::min(setup.multiprocessors / row_blocks(setup), kMlaMaxWorkers);
}
bool loads_pages(const MlaDecodeSetup& setup) {
  return setup.page_size % kTileRows == 0 ||
         (kTileRows % setup.page_size == 0 && setup.page_size >= kLeastBoxKeys);
}

void check_setup(const MlaDecodeSetup& setup) {
  check_argument(setup.sm == 90, "sm is {}, mla_decode needs 90", setup.sm);
  check_argument(setup.dtype == DType::bf16 || setup.dtype == DType::f16,
                 "dtype is {}, accepted: bf16, f16", dtype_name(setup.dtype));
  check_argument(setup.rank == 512 || setup.rank == 256, "rank is {}, accepted: 512, 256",
                 setup.rank);
  check_argument(setup.rope == 64 || setup.rope == 0, "rope is {}, accepted: 64, 0", setup.rope);
  check_argument(setup.cache == MlaCache::as_queries,
                 "cache is e4m3 or fp8_rows, accepted so far: as_queries");
  check_argument(setup.q_heads > 0, "q_heads is {}, at least 1", setup.q_heads);
  check_argument(setup.page_size > 0, "page_size is {}, at least 1", setup.page_size);
  check_argument(setup.multiprocessors > 1, "multiprocessors is {}, at least 2",
                 setup.multiprocessors);
}

MlaWorkList carve(WorkspaceCarver& workspace, const MlaDecodeSetup& setup,
                  const BatchLimits& limits) {
  const int64_t row_tile = int64_t{row_blocks(setup)} * kTileRows;
  // Every request with rows adds less than one tile to the batch's rows / row_tile.
  const int64_t filled = std::min(limits.max_requests, limits.max_tokens);
  const int64_t tiles =
      (int64_t{limits.max_tokens} * setup.q_heads + filled * (row_tile - 1)) / row_tile;
  MlaWorkList work{};
  work.workers = workers(setup);
  work.items = workspace.take<MlaItem>(tiles + work.workers);
  work.ranges = workspace.take<MlaRange>(work.workers);
  work.merges = workspace.take<MlaMerge>(work.workers);
  work.partial_out = workspace.take<float>(2 * work.workers * row_tile * setup.rank);
  work.partial_lse = workspace.take<float>(2 * work.workers * row_tile);
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
       .box = {kColumns, static_cast<uint32_t>(std::gcd(setup.q_heads, kTileRows)), 1}},
      &map);
}

}  // namespace

std::vector<gpu::KernelVariant> MlaDecode::variants(const MlaDecodeSetup& setup) {
  check_setup(setup);
  const std::string blocks = std::to_string(row_blocks(setup));
  const std::string row_tile = std::to_string(row_blocks(setup) * kTileRows);
  const std::string rank = std::to_string(setup.rank);
  const std::string type = *variant_type(setup.dtype);
  return {variant("sm90/mla_plan", {row_tile}, setup),
          variant("sm90/mla_decode",
                  {rank, std::to_string(setup.rope), type, type,
                   loads_pages(setup) ? "pages" : "rows", blocks},
                  setup),
          variant("sm90/mla_merge", {row_tile, rank, type}, setup)};
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
    params.box_keys = std::min(setup_.page_size, kTileRows);
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
  params.page_stride = static_cast<int64_t>(bytes(tensors.page_stride));
  params.token_stride = static_cast<int64_t>(bytes(tensors.token_stride));
  params.page_table = tensors.page_table;
  params.page_table_stride = tensors.page_table_stride;
  params.page_size = setup_.page_size;
  params.q_box_rows = std::gcd(setup_.q_heads, kTileRows);
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
