// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/chunk_common/launch.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/cuda/common/gdn_params.h"
#include "kernels/cuda/common/kda_params.h"
#include "kernels/cuda/common/ssd_params.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kChunkBlocksPerSm = 1;
// One of them runs on an SM. Several, so that SMs with short requests get more of them; not one for
// each task, because most have none in a batch of many decodes.
constexpr int32_t kStateBlocksPerSm = 8;

// The kernels of a kind, or null.
struct Families {
  const char* chunks = nullptr;  // prepares chunks, if states need that
  const char* states = nullptr;
};
Families families_of(RecurrenceKind kind) {
  switch (kind) {
    case RecurrenceKind::delta:
      return {"sm90/gdn_chunks", "sm90/gdn_states"};
    case RecurrenceKind::kda:
      return {"sm90/kda_chunks", "sm90/kda_states"};
    case RecurrenceKind::mamba2:
    case RecurrenceKind::lightning:
      return {nullptr, "sm90/ssd_prefill"};
  }
  return {};
}

// Returns the bytes that sm90/*_chunks write for each chunk and value head.
int64_t bytes_of_terms(RecurrenceKind kind) {
  switch (kind) {
    case RecurrenceKind::delta:
      return sizeof(GdnTerms);
    case RecurrenceKind::kda:
      return sizeof(KdaTerms);
    default:
      return 0;
  }
}

// Room for the chunks of a batch: the maximum of requests that are in_chunks, and of their chunks.
struct Room {
  int32_t walks, chunks;

  Room(const ChunkPrefillSetup& setup, int32_t tokens, int32_t requests)
      : walks(std::min(requests, tokens / setup.min_tokens)),
        chunks(tokens / kChunkTokens + walks) {}
  Room(const ChunkPrefillSetup& setup, const ChunkPrefillBatch& batch)
      : Room(setup, batch.tokens, batch.requests) {}
};

// The parts of the workspace of one batch.
struct Workspace {
  void* terms;  // [chunks, value_heads]
  ChunkPlan plan{};
  size_t bytes = 0;

  // Only counts the bytes if `at` is null.
  Workspace(const ChunkPrefillSetup& setup, const Room& room, void* at) {
    const auto take = [&](int64_t count, size_t size) -> void* {
      const size_t begin = bytes;
      bytes += static_cast<size_t>(count) * size;
      return at == nullptr ? nullptr : static_cast<std::byte*>(at) + begin;
    };
    terms = take(int64_t{room.chunks} * setup.value_heads, bytes_of_terms(setup.kind));
    plan.walks = static_cast<ChunkWalk*>(take(room.walks, sizeof(ChunkWalk)));
    plan.chunks = static_cast<ChunkSpan*>(take(room.chunks, sizeof(ChunkSpan)));
    plan.counts = static_cast<ChunkCounts*>(take(1, sizeof(ChunkCounts)));
    const bool has_terms = families_of(setup.kind).chunks != nullptr;
    if (has_terms) plan.progress = static_cast<uint32_t*>(take(room.chunks, sizeof(uint32_t)));
  }
};

// Describes the rows of tokens, of `width` elements, in boxes of a chunk.
void encode_rows(const void* data, int64_t width, int64_t token_stride, int32_t tokens,
                 gpu::RepeatedTensorMap& repeated, TensorMap& map) {
  repeated.encode({.data = data,
                   .rank = 2,
                   .sizes = {static_cast<uint64_t>(width), static_cast<uint64_t>(tokens)},
                   .strides = {static_cast<uint64_t>(token_stride) * sizeof(uint16_t)},
                   .box = {kBoxWidth, kBoxRows}},
                  &map);
}

}  // namespace

bool ChunkPrefill::serves(const ChunkPrefillSetup& setup) {
  if (setup.sm != 90 || families_of(setup.kind).states == nullptr || setup.key_dim != kKeyDim ||
      setup.key_heads <= 0 || setup.value_heads % setup.key_heads != 0) {
    return false;
  }
  switch (setup.kind) {
    case RecurrenceKind::delta:
      return setup.value_dim == kKeyDim && setup.value_heads / setup.key_heads <= kGdnMaxShare;
    case RecurrenceKind::kda:
      return setup.value_dim == kKeyDim;
    default:
      return setup.value_dim % kBlockValues == 0;
  }
}

std::vector<gpu::KernelVariant> ChunkPrefill::variants(const ChunkPrefillSetup& setup) {
  const Families families = families_of(setup.kind);
  std::vector<gpu::KernelVariant> variants = {
      make_variant(family("sm90/chunk_plan"), {"256"}, setup.sm),
      make_variant(family(families.states), {"bf16"}, setup.sm)};
  if (families.chunks != nullptr) {
    variants.push_back(make_variant(family(families.chunks), {"bf16"}, setup.sm));
  }
  return variants;
}

size_t ChunkPrefill::workspace_bytes(const ChunkPrefillSetup& setup, int32_t max_tokens,
                                     int32_t max_requests) {
  return Workspace(setup, {setup, max_tokens, max_requests}, nullptr).bytes;
}

ChunkPrefill::ChunkPrefill(const ChunkPrefillSetup& setup, gpu::KernelStore& store)
    : setup_(setup) {
  const std::vector<gpu::KernelVariant> needed = variants(setup);
  plan_ = Kernel(needed[0], store);
  states_ = Kernel(needed[1], store);
  if (needed.size() > 2) chunks_ = Kernel(needed[2], store);
}

void ChunkPrefill::plan(const ChunkPrefillBatch& batch, void* workspace,
                        gpu::Launcher launcher) const {
  const Room room(setup_, batch);
  const ChunkPlanParams params = {.plan = Workspace(setup_, room, workspace).plan,
                                  .spans = batch.spans,
                                  .requests = batch.requests,
                                  .max_chunks = room.chunks,
                                  .max_walks = room.walks};
  plan_.launch({1}, params, launcher, kOverlapped);
}

void ChunkPrefill::run(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors,
                       void* workspace, gpu::Launcher launcher) const {
  if (Room(setup_, batch).walks == 0) return;
  switch (setup_.kind) {
    case RecurrenceKind::delta:
      return run_delta(batch, tensors, workspace, launcher);
    case RecurrenceKind::kda:
      return run_kda(batch, tensors, workspace, launcher);
    default:
      return run_sums(batch, tensors, workspace, launcher);
  }
}

void ChunkPrefill::run_delta(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors,
                             void* workspace, gpu::Launcher launcher) const {
  const Room room(setup_, batch);
  const Workspace parts(setup_, room, workspace);
  auto params = params_of<GdnPrefillParams>(batch, tensors, parts.plan);
  encode_keys(batch, tensors, params);
  params.terms = static_cast<GdnTerms*>(parts.terms);
  params.l2_normalise = tensors.l2_normalise_qk;
  launch(chunks_, int64_t{room.chunks} * setup_.key_heads, kChunkBlocksPerSm, params, launcher);
  launch(states_, tasks_of_states(room.walks), kStateBlocksPerSm, params, launcher);
}

void ChunkPrefill::run_kda(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors,
                           void* workspace, gpu::Launcher launcher) const {
  const Room room(setup_, batch);
  const Workspace parts(setup_, room, workspace);
  auto params = params_of<KdaPrefillParams>(batch, tensors, parts.plan);
  params.q = static_cast<const uint16_t*>(tensors.q);
  params.k = static_cast<const uint16_t*>(tensors.k);
  params.q_token_stride = tensors.q_token_stride;
  params.k_token_stride = tensors.k_token_stride;
  params.terms = static_cast<KdaTerms*>(parts.terms);
  params.l2_normalise = tensors.l2_normalise_qk;
  launch(chunks_, int64_t{room.chunks} * setup_.value_heads, kChunkBlocksPerSm, params, launcher);
  launch(states_, tasks_of_states(room.walks), kStateBlocksPerSm, params, launcher);
}

void ChunkPrefill::run_sums(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors,
                            void* workspace, gpu::Launcher launcher) const {
  const Room room(setup_, batch);
  auto params =
      params_of<SsdPrefillParams>(batch, tensors, Workspace(setup_, room, workspace).plan);
  encode_keys(batch, tensors, params);
  params.log_decay_stride = setup_.kind == RecurrenceKind::lightning ? 0 : setup_.value_heads;
  params.skip = tensors.skip;
  launch(states_, tasks_of_states(room.walks), kStateBlocksPerSm, params, launcher);
}

template <typename Params>
Params ChunkPrefill::params_of(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors,
                               const ChunkPlan& plan) const {
  Params params{};
  static_cast<ChunkParams&>(params) = {.spans = batch.spans,
                                       .plan = plan,
                                       .state = tensors.state,
                                       .state_slot_stride = tensors.state_slot_stride,
                                       .out = tensors.out,
                                       .out_token_stride = tensors.out_token_stride,
                                       .key_heads = setup_.key_heads,
                                       .value_heads = setup_.value_heads,
                                       .value_dim = setup_.value_dim,
                                       .scale = tensors.scale,
                                       .state_type = tensors.state_type,
                                       .multiprocessors = setup_.multiprocessors};
  params.log_decay = tensors.log_decay;
  params.strength = tensors.strength;
  encode_rows(tensors.v, int64_t{setup_.value_heads} * setup_.value_dim, tensors.v_token_stride,
              batch.tokens, maps_.v, params.v);
  return params;
}

template <typename Params>
void ChunkPrefill::encode_keys(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors,
                               Params& params) const {
  const int64_t width = int64_t{setup_.key_heads} * kKeyDim;
  encode_rows(tensors.q, width, tensors.q_token_stride, batch.tokens, maps_.q, params.q);
  encode_rows(tensors.k, width, tensors.k_token_stride, batch.tokens, maps_.k, params.k);
}

int64_t ChunkPrefill::tasks_of_states(int32_t walks) const {
  return int64_t{walks} * setup_.value_heads * (setup_.value_dim / states_.row_tile());
}

template <typename Params>
void ChunkPrefill::launch(const Kernel& kernel, int64_t tasks, int32_t blocks_per_sm,
                          const Params& params, gpu::Launcher launcher) const {
  const auto blocks = std::min<int64_t>(tasks, int64_t{blocks_per_sm} * setup_.multiprocessors);
  kernel.launch({static_cast<uint32_t>(blocks)}, params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
