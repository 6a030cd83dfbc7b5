// SPDX-License-Identifier: Apache-2.0
// plan, attention, merge: three launches over one work list.
#include "kernels/cuda/mla_decode.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "core/workspace_carver.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/mla_row.h"

namespace fovea::kernels::cuda {
namespace {

constexpr uint32_t kMergeBlocksPerSm = 2;

// Where each request has two workers: a part that joins the other one leaves less to merge. 26
// instead of 29 us at 32 x 1k, but the longer kernel is 1 % slower where it joins nothing
// (2026-11-22).
constexpr int32_t kPairWorkers = 2;

bool joins_pairs(const MlaDecodeSetup& setup) {
  return !setup.batch_invariant && setup.family->joins_pairs && setup.family->joins_pairs(setup);
}

void check_setup(const MlaDecodeSetup& setup) {
  check_argument(setup.dtype == DType::bf16 || setup.dtype == DType::f16,
                 "dtype is {}, accepted: bf16, f16", dtype_name(setup.dtype));
  check_argument(setup.rank == 512 || setup.rank == 256, "rank is {}, accepted: 512, 256",
                 setup.rank);
  check_argument(setup.rope == 64 || setup.rope == 0, "rope is {}, accepted: 64, 0", setup.rope);
  check_argument(setup.cache != MlaCache::fp8_rows ||
                     (setup.rank == kMlaRowLatent && setup.rope == kMlaRowRope),
                 "rank, rope are {}, {}: fp8_rows hold {}, {}", setup.rank, setup.rope,
                 kMlaRowLatent, kMlaRowRope);
  check_argument(setup.q_heads > 0, "q_heads is {}, at least 1", setup.q_heads);
  check_argument(setup.page_size > 0, "page_size is {}, at least 1", setup.page_size);
  check_argument(setup.multiprocessors > 1, "multiprocessors is {}, at least 2",
                 setup.multiprocessors);
  setup.family->check(setup);
}

MlaWorkList carve(WorkspaceCarver& workspace, const MlaDecodeSetup& setup,
                  const BatchLimits& limits) {
  const int64_t rows = setup.family->row_tile(setup);
  // Every request with rows adds less than one tile to the batch's rows / row_tile.
  const int64_t filled = std::min(limits.max_requests, limits.max_tokens);
  const int64_t tiles = (int64_t{limits.max_tokens} * setup.q_heads + filled * (rows - 1)) / rows;
  MlaWorkList work{};
  work.workers = setup.family->workers(setup);
  work.items = workspace.take<MlaItem>(tiles + work.workers);
  work.ranges = workspace.take<MlaRange>(work.workers);
  work.merges = workspace.take<MlaMerge>(work.workers);
  const DType parts = setup.family->parts(setup);
  const int64_t part_rows = 2 * work.workers * rows;
  work.partial_out = workspace.take<std::byte>(part_rows * setup.rank * dtype_bytes(parts));
  work.partial_lse = workspace.take<float>(part_rows);
  work.partial_units = workspace.take<float>(parts == DType::f16 ? 2 * part_rows : 0);
  work.arrivals = workspace.take<uint32_t>(4 * work.workers);
  return work;
}

gpu::KernelVariant variant(std::string_view folder, const VariantValues& values,
                           const MlaDecodeSetup& setup) {
  return make_variant(family(folder), values, setup.sm);
}

}  // namespace

int32_t MlaDecode::row_tile(const MlaDecodeSetup& setup) { return setup.family->row_tile(setup); }

std::vector<gpu::KernelVariant> MlaDecode::variants(const MlaDecodeSetup& setup) {
  check_setup(setup);
  const std::string rows = std::to_string(row_tile(setup));
  const bool f16_parts = setup.family->parts(setup) == DType::f16;
  const auto decode = [&](bool pairs) {
    return variant(setup.family->folder, setup.family->values(setup, pairs), setup);
  };
  std::vector<gpu::KernelVariant> needed = {
      variant("portable/mla_plan", {rows}, setup), decode(false),
      variant(
          f16_parts ? "sm90/mla_merge" : "portable/mla_merge",
          {rows, std::to_string(setup.rank), *variant_type(setup.dtype), f16_parts ? "f16" : "f32"},
          setup)};
  if (joins_pairs(setup)) needed.push_back(decode(true));
  return needed;
}

MlaDecode::MlaDecode(const MlaDecodeSetup& setup, gpu::KernelStore& store) : setup_(setup) {
  const std::vector<gpu::KernelVariant> needed = variants(setup);
  plan_ = Kernel(needed[0], store);
  decode_ = Kernel(needed[1], store);
  merge_ = Kernel(needed[2], store);
  if (needed.size() > 3) decode_pairs_ = Kernel(needed[3], store);
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

void MlaDecode::plan(const BatchParams& batch, const PlanCompany& company, Stream stream,
                     const uint8_t* skip) {
  check_argument(work_.items != nullptr, "plan() before reserve()");
  batch_ = batch;
  pairs_ =
      joins_pairs(setup_) && batch.requests > 0 && work_.workers / batch.requests == kPairWorkers;
  list_settled_ = false;
  launch_plan(plan_, 1, MlaPlanParams{batch, skip, work_, setup_.batch_invariant, pairs_}, company,
              stream);
}

void MlaDecode::decode(const MlaDecodeTensors& tensors, Stream stream) const {
  check_argument(work_.items != nullptr, "decode() before reserve()");
  if (batch_.requests == 0 || tensors.tokens == 0) return;
  setup_.family->attend({setup_, tensors, batch_, work_, list_settled_, maps_},
                        pairs_ ? decode_pairs_ : decode_, stream);
  list_settled_ = true;
  if (setup_.batch_invariant) return;
  const MlaMergeParams merge{
      work_,       tensors.out,   tensors.out_token_stride, tensors.out_head_stride,
      tensors.lse, setup_.q_heads};
  const GridSize grid{kMergeBlocksPerSm * static_cast<uint32_t>(setup_.multiprocessors)};
  merge_.launch_overlapped(grid, merge, stream);
}

}  // namespace fovea::kernels::cuda
