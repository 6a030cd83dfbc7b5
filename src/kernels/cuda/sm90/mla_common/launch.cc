// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/mla_common/launch.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "core/check.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/sm90/mla_decode/launch.h"
#include "kernels/cuda/sm90/mla_decode_16/launch.h"
#include "kernels/cuda/sm90/mla_decode_fp8_narrow/launch.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kWideRows = 64;  // rows of a block of sm90/mla_decode
constexpr int32_t kTileKeys = 64;
constexpr int32_t kColumns = 64;  // columns of a box: a swizzled row of 128 bytes
constexpr int32_t kGroupKeys = 8;

int32_t block_rows(const MlaDecodeSetup& setup) {
  const int64_t rows = int64_t{setup.max_q_len} * setup.q_heads;
  // Products of another shape round differently, so batch-invariant rows have one shape.
  if (setup.batch_invariant || rows > 32) return kWideRows;
  if (rows <= 16) return 16;
  return setup.cache == MlaCache::as_queries ? kWideRows : 32;
}
int32_t row_tile(const MlaDecodeSetup& setup) { return block_rows(setup) * row_blocks(setup); }

int32_t workers(const MlaDecodeSetup& setup) {
  return std::min(setup.multiprocessors / row_blocks(setup), kMlaMaxWorkers);
}

// Returns the size of the cache's elements, as strides count them.
int64_t element_bytes(const MlaDecodeSetup& setup) {
  return setup.cache == MlaCache::as_queries ? sizeof(uint16_t) : 1;
}

void check(const MlaDecodeSetup& setup) {
  check_argument(setup.sm == 90, "sm is {}, mla_decode needs 90", setup.sm);
  check_argument(!setup.scale_per_token, "a scale for each token: mla_decode takes one for all");
  check_argument(!setup.windowed, "a window: mla_decode has none");
}

uint64_t bytes(int64_t elements) { return static_cast<uint64_t>(elements) * sizeof(uint16_t); }

void encode_rope_queries(const MlaPass& pass, uint32_t box_rows, TensorMap& map) {
  const MlaDecodeTensors& tensors = pass.tensors;
  pass.maps.q_rope.encode(
      {.data = tensors.q_rope.data,
       .rank = 3,
       .sizes = {static_cast<uint64_t>(pass.setup.rope), static_cast<uint64_t>(pass.setup.q_heads),
                 static_cast<uint64_t>(tensors.tokens)},
       .strides = {bytes(tensors.q_rope.head_stride), bytes(tensors.q_rope.token_stride)},
       .box = {kColumns, box_rows, 1}},
      &map);
}

void encode_latent_queries(const MlaPass& pass, uint32_t box_rows, uint32_t box_tiles,
                           TensorMap& map) {
  const MlaDecodeTensors& tensors = pass.tensors;
  pass.maps.q_latent.encode({.data = tensors.q_latent.data,
                             .rank = 4,
                             .sizes = {kColumns, static_cast<uint64_t>(pass.setup.q_heads),
                                       static_cast<uint64_t>(pass.setup.rank / kColumns),
                                       static_cast<uint64_t>(tensors.tokens)},
                             .strides = {bytes(tensors.q_latent.head_stride), bytes(kColumns),
                                         bytes(tensors.q_latent.token_stride)},
                             .box = {kColumns, box_rows, box_tiles, 1}},
                            &map);
}

void encode_cache(const MlaPass& pass, int32_t box_keys, uint32_t box_tiles,
                  gpu::RepeatedTensorMap& repeated, TensorMap& map) {
  const MlaDecodeSetup& setup = pass.setup;
  const MlaDecodeTensors& tensors = pass.tensors;
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

bool is_narrow(const MlaDecodeSetup& setup) { return block_rows(setup) < kWideRows; }

// f32 parts of all workers' 64-row tiles are 17 MB, which take too long to write and to read again.
DType parts(const MlaDecodeSetup& setup) {
  return is_narrow(setup) && setup.cache != MlaCache::as_queries ? DType::f32 : DType::f16;
}

// Pairs are for two neighbouring blocks of 64 rows, whose parts take longest to merge; blocks that
// convert fp8 rows have no registers to spare. Joining by blocks is for 16 rows: with 64 it is no
// faster than the merge.
bool has_joins(const MlaDecodeSetup& setup, MlaJoins joins) {
  if (joins == MlaJoins::clusters) return loads_pages(setup);
  if (setup.cache != MlaCache::as_queries) return false;
  return joins == MlaJoins::pairs ? row_blocks(setup) == 2 : is_narrow(setup);
}

gpu::KernelVariant variant(const MlaDecodeSetup& setup, MlaJoins joins) {
  if (joins == MlaJoins::clusters) return mla_decode_16_variant(setup, joins);
  if (!is_narrow(setup)) return mla_decode_variant(setup, joins);
  if (setup.cache == MlaCache::as_queries) return mla_decode_16_variant(setup, joins);
  return mla_decode_fp8_narrow_variant(setup, block_rows(setup));
}

void attend(const MlaPass& pass, const Kernel& kernel, gpu::Launcher launcher) {
  if (pass.work.cluster > 1) return launch_mla_decode_16(pass, kernel, launcher);
  if (!is_narrow(pass.setup)) return launch_mla_decode(pass, kernel, launcher);
  if (pass.setup.cache == MlaCache::as_queries) return launch_mla_decode_16(pass, kernel, launcher);
  launch_mla_decode_fp8_narrow(pass, block_rows(pass.setup), kernel, launcher);
}

}  // namespace

bool loads_pages(const MlaDecodeSetup& setup) {
  return setup.cache == MlaCache::as_queries &&
         (setup.page_size % kTileKeys == 0 ||
          (kTileKeys % setup.page_size == 0 && setup.page_size >= kGroupKeys));
}

std::string keys_name(const MlaDecodeSetup& setup) {
  if (setup.cache == MlaCache::fp8_rows) return "fp8_rows";
  if (setup.cache == MlaCache::e4m3) return "e4m3";
  return loads_pages(setup) ? "pages" : "rows";
}

int32_t row_blocks(const MlaDecodeSetup& setup) {
  return int64_t{setup.max_q_len} * setup.q_heads > kWideRows ? 2 : 1;
}

MlaDecodeParams decode_params(const MlaPass& pass, const MlaBlockShape& shape) {
  const MlaDecodeSetup& setup = pass.setup;
  const MlaDecodeTensors& tensors = pass.tensors;
  MlaDecodeParams params{};
  params.q_box_rows = std::gcd(setup.q_heads, shape.rows);
  const auto q_box_rows = static_cast<uint32_t>(params.q_box_rows);
  if (loads_pages(setup)) {
    params.box_keys = std::min(setup.page_size, kTileKeys);
    encode_cache(pass, params.box_keys, shape.key_tiles, pass.maps.cache, params.cache_map);
    encode_cache(pass, params.box_keys, 1, pass.maps.cache_rope, params.cache_rope_map);
  }
  encode_latent_queries(pass, q_box_rows, params.q_box_rows == shape.rows ? shape.query_tiles : 1,
                        params.q_latent_map);
  if (setup.rope > 0) encode_rope_queries(pass, q_box_rows, params.q_rope_map);
  params.batch = pass.batch;
  params.cache = tensors.cache;
  params.page_stride = tensors.page_stride * element_bytes(setup);
  params.token_stride = tensors.token_stride * element_bytes(setup);
  params.cache_scale = tensors.cache_scale;
  params.page_table = tensors.page_table;
  params.page_size = setup.page_size;
  params.tile_pages = kTileKeys / setup.page_size;
  params.tile_page_keys = kTileKeys % setup.page_size;
  params.out = tensors.out;
  params.scale = tensors.scale;
  params.work = pass.work;
  params.ranges = pass.work.ranges;
  params.q_heads = pass.batch.q_heads;
  params.list_complete = pass.list_complete;
  params.keys_complete = pass.keys_complete;
  params.join_patience = setup.join_patience;
  return params;
}

const MlaFamily& hopper_mla() {
  static constexpr MlaFamily kFamily = {.check = check,
                                        .row_tile = row_tile,
                                        .workers = workers,
                                        .parts = parts,
                                        .variant = variant,
                                        .joins = has_joins,
                                        .attend = attend};
  return kFamily;
}

}  // namespace fovea::kernels::cuda
