// SPDX-License-Identifier: Apache-2.0
// Plan, attention and merge: three launches over one work list.
#include "kernels/cuda/mla_decode.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "core/workspace_carver.h"
#include "kernels/cuda/sm90/bounds.h"
#include "kernels/mla_row.h"

namespace fovea::kernels::cuda {
namespace {

bool has_joins(const MlaDecodeSetup& setup, MlaJoins joins) {
  return !setup.batch_invariant && setup.family->joins && setup.family->joins(setup, joins);
}
MlaJoins usual_joins(const MlaDecodeSetup& setup) {
  return has_joins(setup, MlaJoins::blocks) ? MlaJoins::blocks : MlaJoins::merge;
}

hopper::MlaForms joins_of(const MlaDecodeSetup& setup) {
  return {.usual = usual_joins(setup),
          .pairs = has_joins(setup, MlaJoins::pairs),
          .clusters = has_joins(setup, MlaJoins::clusters)};
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

int32_t cluster_workers(const MlaDecodeSetup& setup) {
  return std::min(setup.multiprocessors, kMlaMaxWorkers);
}

MlaWorkList carve(WorkspaceCarver& workspace, const MlaDecodeSetup& setup,
                  const BatchLimits& limits) {
  const int64_t rows = setup.family->row_tile(setup);
  // Every request with rows adds less than one tile to the quotient of the batch's rows and
  // row_tile.
  const int64_t filled = std::min(limits.max_requests, limits.max_tokens);
  const int64_t tiles = (int64_t{limits.max_tokens} * setup.q_heads + filled * (rows - 1)) / rows;
  MlaWorkList work{};
  work.workers = setup.family->workers(setup);
  work.cluster = 1;
  // In clusters each block is a worker; row tiles are no larger and parts are f32.
  const bool clusters = has_joins(setup, MlaJoins::clusters);
  const int64_t blocks = clusters ? cluster_workers(setup) : 0;
  const int64_t workers = std::max<int64_t>(work.workers, blocks);
  const int64_t cluster_rows = blocks * kMlaClusterRows;
  work.items = workspace.take<MlaItem>(std::max(tiles + work.workers, workers));
  const int64_t ranges = has_joins(setup, MlaJoins::pairs) ? 2 * work.workers : 0;
  work.ranges = workspace.take<MlaRange>(std::max(workers, ranges));
  work.merges = workspace.take<MlaMerge>(workers);
  const DType parts = setup.family->parts(setup);
  const int64_t part_rows = 2 * work.workers * rows;
  const auto part_bytes = static_cast<int64_t>(dtype_bytes(parts));
  work.partial_out = workspace.take<std::byte>(
      setup.rank * std::max<int64_t>(part_rows * part_bytes, cluster_rows * sizeof(float)));
  work.partial_lse = workspace.take<float>(std::max(part_rows, cluster_rows));
  work.partial_units = workspace.take<float>(parts == DType::f16 ? 2 * part_rows : 0);
  work.arrivals = workspace.take<uint32_t>(std::max<int64_t>(work.workers, cluster_rows));
  return work;
}

MlaMergeSetup merge_setup(const MlaDecodeSetup& setup) {
  return {.row_tile = setup.family->row_tile(setup),
          .rank = setup.rank,
          .out = setup.dtype,
          .parts = setup.family->parts(setup),
          .sm = setup.sm,
          .multiprocessors = setup.multiprocessors};
}
gpu::KernelVariant decode_variant(const MlaDecodeSetup& setup, MlaJoins joins) {
  return setup.family->variant(setup, joins);
}

}  // namespace

int32_t MlaDecode::row_tile(const MlaDecodeSetup& setup) { return setup.family->row_tile(setup); }

std::vector<gpu::KernelVariant> MlaDecode::variants(const MlaDecodeSetup& setup) {
  check_setup(setup);
  std::vector<gpu::KernelVariant> needed = {mla_plan_variant(row_tile(setup), setup.sm),
                                            decode_variant(setup, usual_joins(setup))};
  if (usual_joins(setup) == MlaJoins::merge)
    needed.push_back(mla_merge_variant(merge_setup(setup)));
  if (has_joins(setup, MlaJoins::pairs)) needed.push_back(decode_variant(setup, MlaJoins::pairs));
  if (has_joins(setup, MlaJoins::clusters)) {
    needed.push_back(mla_plan_variant(kMlaClusterRows, setup.sm));
    needed.push_back(decode_variant(setup, MlaJoins::clusters));
  }
  return needed;
}

MlaDecode::MlaDecode(const MlaDecodeSetup& setup, gpu::KernelStore& store) : setup_(setup) {
  check_setup(setup);
  plan_ = MlaPlan(row_tile(setup), setup.sm, store);
  decode_ = Kernel(decode_variant(setup, usual_joins(setup)), store);
  if (usual_joins(setup) == MlaJoins::merge) merge_ = MlaMergeKernel(merge_setup(setup), store);
  if (has_joins(setup, MlaJoins::pairs)) {
    decode_pairs_ = Kernel(decode_variant(setup, MlaJoins::pairs), store);
  }
  if (has_joins(setup, MlaJoins::clusters)) {
    plan_clusters_ = MlaPlan(kMlaClusterRows, setup.sm, store);
    decode_clusters_ = Kernel(decode_variant(setup, MlaJoins::clusters), store);
    decode_clusters_.allow_large_clusters();
    for (const int32_t size : {kMlaMaxCluster / 2, kMlaMaxCluster}) {
      clusters_.push_back(
          {size, std::min(decode_clusters_.active_clusters(static_cast<uint32_t>(size)),
                          cluster_workers(setup) / size)});
    }
  }
}

size_t MlaDecode::workspace_bytes(const MlaDecodeSetup& setup, const BatchLimits& limits) {
  check_setup(setup);
  WorkspaceCarver counter(nullptr);
  carve(counter, setup, limits);
  return counter.bytes();
}

void MlaDecode::reserve(const BatchLimits& limits, std::byte* workspace) {
  WorkspaceCarver carver(workspace);
  work_ = reserved_ = carve(carver, setup_, limits);
  limits_ = limits;
}

void MlaDecode::plan(const PlanRequest& request, PlanQueue& plans, const uint8_t* skip) {
  check_argument(reserved_.items != nullptr, "plan() before reserve()");
  batch_ = request.batch;
  const hopper::MlaChoice choice =
      hopper::choose_mla(joins_of(setup_), row_tile(), reserved_.workers, clusters_,
                         hopper::bounds_of(request, limits_));
  joins_ = choice.joins;
  work_ = reserved_;
  work_.workers = choice.workers;
  work_.cluster = choice.cluster;
  prefix_written_ = request.keys.prefix_written;
  list_complete_ = false;
  const MlaPlan& plan = joins_ == MlaJoins::clusters ? plan_clusters_ : plan_;
  plan.add({batch_, skip, work_, setup_.batch_invariant, joins_}, plans);
}

void MlaDecode::attend(const MlaDecodeTensors& tensors, gpu::Launcher launcher) const {
  check_argument(reserved_.items != nullptr, "attend() before reserve()");
  if (batch_.requests == 0 || tensors.tokens == 0) return;
  const Kernel& kernel = joins_ == MlaJoins::clusters ? decode_clusters_
                         : joins_ == MlaJoins::pairs  ? decode_pairs_
                                                      : decode_;
  setup_.family->attend(
      {setup_, tensors, batch_, work_, list_complete_, list_complete_ && prefix_written_, maps_},
      kernel, launcher);
  list_complete_ = true;
  if (setup_.batch_invariant || joins_ == MlaJoins::clusters || joins_ == MlaJoins::blocks) return;
  merge_.run({work_, tensors.out, setup_.q_heads}, launcher);
}

}  // namespace fovea::kernels::cuda
