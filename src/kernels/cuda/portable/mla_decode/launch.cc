// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "core/check.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/mla_decode.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int kMinSm = 80;
constexpr int32_t kMaxRows = 64;

void check(const MlaDecodeSetup& setup) {
  check_argument(setup.sm >= kMinSm, "sm is {}, at least {}", setup.sm, kMinSm);
}

// Tiles of another height sum in another order, so batch-invariant rows meet one only.
int32_t row_tile(const MlaDecodeSetup& setup) {
  const int64_t rows = int64_t{setup.max_q_len} * setup.q_heads;
  if (setup.windowed) return 16;  // MlaDecodeConfig::kWindows
  if (setup.batch_invariant) return kMaxRows;
  return rows <= 16 ? 16 : rows <= 32 ? 32 : kMaxRows;
}

int32_t workers(const MlaDecodeSetup& setup) {
  return std::min(setup.multiprocessors, kMlaMaxWorkers);
}

const char* keys_name(MlaCache cache) {
  switch (cache) {
    case MlaCache::e4m3:
      return "e4m3";
    case MlaCache::fp8_rows:
      return "fp8_rows";
    default:
      return "rows";
  }
}

gpu::KernelVariant variant(const MlaDecodeSetup& setup, MlaJoins) {
  return make_variant(
      family("portable/mla_decode"),
      {std::to_string(setup.rank), std::to_string(setup.rope), *variant_type(setup.dtype),
       keys_name(setup.cache), std::to_string(row_tile(setup))},
      setup.sm);
}

void attend(const MlaPass& pass, const Kernel& kernel, gpu::Launcher launcher) {
  const MlaDecodeTensors& tensors = pass.tensors;
  const int64_t bytes = pass.setup.cache == MlaCache::as_queries ? sizeof(uint16_t) : 1;
  PortableMlaParams params{};
  params.batch = pass.batch;
  params.q_latent = tensors.q_latent;
  params.q_rope = tensors.q_rope;
  params.cache = tensors.cache;
  params.page_stride = tensors.page_stride * bytes;
  params.token_stride = tensors.token_stride * bytes;
  params.page_table = tensors.page_table;
  params.page_size = pass.setup.page_size;
  params.out = tensors.out;
  params.scale = tensors.scale;
  params.cache_scale = tensors.cache_scale;
  params.cache_scale_stride = pass.setup.scale_per_token ? 1 : 0;
  params.work = pass.work;
  const GridSize grid{static_cast<uint32_t>(pass.work.workers)};
  kernel.launch(grid, params, launcher, kOverlapped);
}

}  // namespace

const MlaFamily& portable_mla() {
  static constexpr MlaFamily kFamily = {.check = check,
                                        .row_tile = row_tile,
                                        .workers = workers,
                                        .parts = [](const MlaDecodeSetup&) { return DType::f32; },
                                        .variant = variant,
                                        .attend = attend};
  return kFamily;
}

}  // namespace fovea::kernels::cuda
