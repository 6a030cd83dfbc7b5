// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <string>

#include "core/check.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/mla_decode.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kTileRows = 64;
constexpr int32_t kTileKeys = 64;
constexpr int32_t kColumns = 64;  // of a box: a swizzled row of 128 bytes
constexpr int32_t kGroupKeys = 8;

// Query rows of a block, and blocks that share a request's keys.
int32_t block_rows(const MlaDecodeSetup& setup) {
  const int64_t rows = int64_t{setup.max_q_len} * setup.q_heads;
  // Products of another shape round in another way.
  if (setup.batch_invariant || rows > 32) return kTileRows;
  if (rows <= 16) return 16;
  return setup.cache == MlaCache::as_queries ? kTileRows : 32;
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
          (kTileKeys % setup.page_size == 0 && setup.page_size >= kGroupKeys));
}
// Elements of the cache, as strides count them.
int64_t element_bytes(const MlaDecodeSetup& setup) {
  return setup.cache == MlaCache::as_queries ? sizeof(uint16_t) : 1;
}

void check(const MlaDecodeSetup& setup) {
  check_argument(setup.sm == 90, "sm is {}, mla_decode needs 90", setup.sm);
  check_argument(!setup.scale_per_token, "a scale for each token: mla_decode takes one for all");
  check_argument(!setup.windowed, "a window: mla_decode has none");
}

uint64_t bytes(int64_t elements) { return static_cast<uint64_t>(elements) * sizeof(uint16_t); }

void encode_rope_queries(const MlaDecodeSetup& setup, const MlaDecodeTensors& tensors,
                         uint32_t box_rows, gpu::RepeatedTensorMap& repeated, TensorMap& map) {
  repeated.encode(
      {.data = tensors.q_rope,
       .rank = 3,
       .sizes = {static_cast<uint64_t>(setup.rope), static_cast<uint64_t>(setup.q_heads),
                 static_cast<uint64_t>(tensors.tokens)},
       .strides = {bytes(tensors.q_rope_head_stride), bytes(tensors.q_rope_token_stride)},
       .box = {kColumns, box_rows, 1}},
      &map);
}

// Column tiles of latent queries that a block of `rows` rows has side by side, as the kernel's
// configuration has them.
uint32_t query_tiles(const MlaDecodeSetup& setup, int32_t rows) {
  if (rows < kTileRows) return static_cast<uint32_t>(setup.rank / kColumns);
  return loads_pages(setup) ? static_cast<uint32_t>(setup.rank / 2 / kColumns) : 1;
}

void encode_latent_queries(const MlaDecodeSetup& setup, const MlaDecodeTensors& tensors,
                           uint32_t box_rows, uint32_t box_tiles, gpu::RepeatedTensorMap& repeated,
                           TensorMap& map) {
  repeated.encode({.data = tensors.q_latent,
                   .rank = 4,
                   .sizes = {kColumns, static_cast<uint64_t>(setup.q_heads),
                             static_cast<uint64_t>(setup.rank / kColumns),
                             static_cast<uint64_t>(tensors.tokens)},
                   .strides = {bytes(tensors.q_latent_head_stride), bytes(kColumns),
                               bytes(tensors.q_latent_token_stride)},
                   .box = {kColumns, box_rows, box_tiles, 1}},
                  &map);
}

int32_t row_tile(const MlaDecodeSetup& setup) { return block_rows(setup) * row_blocks(setup); }

// Column tiles of a stage of keys, as the kernel's configuration has them.
uint32_t stage_tiles(const MlaDecodeSetup& setup, int32_t rows) {
  return rows < kTileRows ? 2 : static_cast<uint32_t>(setup.rank / 2 / kColumns);
}

void encode_cache(const MlaDecodeSetup& setup, const MlaDecodeTensors& tensors, int32_t box_keys,
                  uint32_t box_tiles, gpu::RepeatedTensorMap& repeated, TensorMap& map) {
  repeated.encode(
      {.data = tensors.cache,
       .rank = 5,
       .sizes = {kColumns, kGroupKeys, static_cast<uint64_t>((setup.rank + setup.rope) / kColumns),
                 static_cast<uint64_t>(setup.page_size / kGroupKeys),
                 static_cast<uint64_t>(tensors.pages)},
       .strides = {bytes(tensors.token_stride), bytes(kColumns),
                   bytes(kGroupKeys * tensors.token_stride), bytes(tensors.page_stride)},
       .box = {kColumns, kGroupKeys, box_tiles, static_cast<uint32_t>(box_keys / kGroupKeys), 1}},
      &map);
}

// All workers' f32 parts of wide tiles are 17 MB: 4 us to write and 5 to read again (2026-11-21).
DType parts(const MlaDecodeSetup& setup) {
  const bool as_queries = setup.cache == MlaCache::as_queries;
  return block_rows(setup) < kTileRows && !as_queries ? DType::f32 : DType::f16;
}

// Pairs: blocks of 64 rows side by side, whose pieces take longest to merge; converting ones have
// no registers to spare. Blocks: of fewer rows; those of 64 join no faster than the merge
// (2026-11-22).
bool has_joins(const MlaDecodeSetup& setup, MlaJoins joins) {
  if (joins == MlaJoins::clusters) return loads_pages(setup);
  if (setup.cache != MlaCache::as_queries) return false;
  return joins == MlaJoins::pairs ? row_blocks(setup) == 2 : block_rows(setup) < kTileRows;
}

VariantValues values(const MlaDecodeSetup& setup, MlaJoins joins) {
  const std::string type = *variant_type(setup.dtype);
  const bool fp8 = setup.cache != MlaCache::as_queries;
  const bool clusters = joins == MlaJoins::clusters;
  const char* loader = loads_pages(setup)                  ? "pages"
                       : setup.cache == MlaCache::fp8_rows ? "scaled"
                                                           : "rows";
  return {std::to_string(setup.rank),
          std::to_string(setup.rope),
          type,
          fp8 ? *variant_type(DType::f8e4m3) : type,
          loader,
          std::to_string(clusters ? kMlaClusterRows : block_rows(setup)),
          std::to_string(clusters ? 1 : row_blocks(setup)),
          std::to_string(static_cast<int>(joins))};
}

void attend(const MlaPass& pass, const Kernel& kernel, Stream stream) {
  const MlaDecodeSetup& setup = pass.setup;
  const MlaDecodeTensors& tensors = pass.tensors;
  MlaDecodeParams params{};
  const bool clusters = pass.work.cluster > 1;
  const int32_t rows = clusters ? kMlaClusterRows : block_rows(setup);
  params.q_box_rows = std::gcd(setup.q_heads, rows);
  const auto q_box_rows = static_cast<uint32_t>(params.q_box_rows);
  if (loads_pages(setup)) {
    params.box_keys = std::min(setup.page_size, kTileKeys);
    encode_cache(setup, tensors, params.box_keys, stage_tiles(setup, rows), pass.maps.cache,
                 params.cache_map);
    encode_cache(setup, tensors, params.box_keys, 1, pass.maps.cache_rope, params.cache_rope_map);
  }
  encode_latent_queries(setup, tensors, q_box_rows,
                        params.q_box_rows == rows ? query_tiles(setup, rows) : 1,
                        pass.maps.q_latent, params.q_latent_map);
  if (setup.rope > 0) {
    encode_rope_queries(setup, tensors, q_box_rows, pass.maps.q_rope, params.q_rope_map);
  }
  params.batch = pass.batch;
  params.cache = tensors.cache;
  params.page_stride = tensors.page_stride * element_bytes(setup);
  params.token_stride = tensors.token_stride * element_bytes(setup);
  params.cache_scale = tensors.cache_scale;
  params.page_table = tensors.page_table;
  params.page_table_stride = tensors.page_table_stride;
  params.page_size = setup.page_size;
  params.tile_pages = kTileKeys / setup.page_size;
  params.tile_page_keys = kTileKeys % setup.page_size;
  params.out = tensors.out;
  params.out_token_stride = tensors.out_token_stride;
  params.out_head_stride = tensors.out_head_stride;
  params.lse = tensors.lse;
  params.scale = tensors.scale;
  params.work = pass.work;
  params.ranges = pass.work.ranges;
  params.q_heads = pass.batch.q_heads;
  params.list_settled = pass.list_settled;
  params.keys_settled = pass.keys_settled;
  params.join_patience = setup.join_patience;
  const auto blocks = static_cast<uint32_t>(pass.work.workers * (clusters ? 1 : row_blocks(setup)));
  // Two blocks over the same keys: fp8 ones convert for each other; pairs have the same rows
  // instead and send each other values. Others only have to be neighbours, but where the kernel
  // ahead leaves multiprocessors one by one, blocks by themselves do not come to be: 238.6 instead
  // of 233.4 us at 128 x 4k (2026-11-22).
  kernel.launch_overlapped({blocks}, params, stream,
                           static_cast<uint32_t>(clusters ? pass.work.cluster : row_blocks(setup)));
}

}  // namespace

const MlaFamily& hopper_mla() {
  static constexpr MlaFamily kFamily = {.folder = "sm90/mla_decode",
                                        .check = check,
                                        .row_tile = row_tile,
                                        .workers = workers,
                                        .parts = parts,
                                        .values = values,
                                        .joins = has_joins,
                                        .attend = attend};
  return kFamily;
}

}  // namespace fovea::kernels::cuda
