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

// Returns how many walks, each with all its heads, run at the same time.
int32_t walks_at_once(const ChunkPrefillSetup& setup) {
  return setup.multiprocessors / (setup.value_heads * (setup.value_dim / kBlockValues));
}

// Requests are cut only if at least so many walks run at the same time and the batch has room for
// at least so many chunks: segments wait for the terms of all chunks, while a whole request follows
// its own (chosen on H200, 2026-12-01).
struct CutLimits {
  int32_t walks, chunks;
};
CutLimits limits_of(const ChunkPrefillSetup& setup) {
  if (setup.cuts_short_requests) return {3, 0};
  return setup.kind == RecurrenceKind::kda ? CutLimits{6, 48} : CutLimits{3, 24};
}
constexpr int32_t kMinSegment = 4;  // chunks

// Returns whether requests of some batches are cut into segments.
bool cuts(const ChunkPrefillSetup& setup) {
  return families_of(setup.kind).chunks != nullptr &&
         walks_at_once(setup) >= limits_of(setup).walks;
}

int32_t min_segment(const ChunkPrefillSetup& setup) {
  return setup.cuts_short_requests ? 1 : kMinSegment;
}

// Costs as measured on H200, 2026-12-01.
SegmentCosts costs_of(const ChunkPrefillSetup& setup) {
  if (setup.cuts_short_requests) return {};
  const int32_t share = setup.value_heads / setup.key_heads;
  // Multiprocessors times the time of all terms of a chunk.
  const int32_t terms = setup.kind == RecurrenceKind::kda
                            ? setup.value_heads * 5 * kCostOfChunk
                            : setup.key_heads * (10 * share + 7) * kCostOfChunk / 7;
  return {.effect = kCostOfChunk * 9 / 10,
          .join = kCostOfChunk * 3 / 2,
          .terms = terms / setup.multiprocessors};
}

// Room for the chunks of a batch: the maximum of requests that are in_chunks, and of their chunks.
struct Room {
  int32_t requests, chunks;
  int32_t effects;  // segments whose effects are kept: all but the last of each request

  Room(const ChunkPrefillSetup& setup, int32_t tokens, int32_t batch_requests)
      : requests(std::min(batch_requests, tokens / setup.min_tokens)),
        chunks(tokens / kChunkTokens + requests),
        effects(0) {
    if (!cuts(setup) || chunks < limits_of(setup).chunks) return;
    effects = std::min(walks_at_once(setup), chunks / min_segment(setup));
  }
  Room(const ChunkPrefillSetup& setup, const ChunkPrefillBatch& batch)
      : Room(setup, batch.tokens, batch.requests) {}

  // Returns the maximum of walks: a segment with an effect has up to two.
  int32_t walks() const { return requests + 2 * effects; }
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
    const int64_t effects = int64_t{room.effects} * setup.value_heads;
    plan.effects = static_cast<SegmentEffect*>(
        take(effects * (setup.value_dim / kBlockValues), sizeof(SegmentEffect)));
    plan.walks = static_cast<ChunkWalk*>(take(room.walks(), sizeof(ChunkWalk)));
    plan.chunks = static_cast<ChunkSpan*>(take(room.chunks, sizeof(ChunkSpan)));
    plan.counts = static_cast<ChunkCounts*>(take(1, sizeof(ChunkCounts)));
    const bool has_terms = families_of(setup.kind).chunks != nullptr;
    if (has_terms) plan.progress = static_cast<uint32_t*>(take(room.chunks, sizeof(uint32_t)));
    plan.found = static_cast<uint32_t*>(take(effects, sizeof(uint32_t)));
    plan.taken = static_cast<uint32_t*>(take(1, sizeof(uint32_t)));
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
  const auto variant = [&](const char* name, std::vector<std::string> values) {
    return make_variant(family(name), values, setup.sm);
  };
  std::vector<gpu::KernelVariant> variants = {variant("sm90/chunk_plan", {"256", "false"})};
  if (families.chunks == nullptr) {
    variants.push_back(variant(families.states, {"bf16"}));
    return variants;
  }
  variants.push_back(variant(families.states, {"bf16", "false"}));
  variants.push_back(variant(families.chunks, {"bf16"}));
  if (cuts(setup)) {
    variants.push_back(variant("sm90/chunk_plan", {"256", "true"}));
    variants.push_back(variant(families.states, {"bf16", "true"}));
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
  if (cuts(setup)) {
    cutting_plan_ = Kernel(needed[3], store);
    cut_states_ = Kernel(needed[4], store);
  }
}

void ChunkPrefill::plan(const ChunkPrefillBatch& batch, void* workspace,
                        gpu::Launcher launcher) const {
  const Room room(setup_, batch);
  const ChunkPlanParams params = {.plan = Workspace(setup_, room, workspace).plan,
                                  .spans = batch.spans,
                                  .requests = batch.requests,
                                  .max_chunks = room.chunks,
                                  .max_chunked = room.requests,
                                  .max_effects = room.effects,
                                  .value_heads = setup_.value_heads,
                                  .room = walks_at_once(setup_),
                                  .min_segment = min_segment(setup_),
                                  .costs = costs_of(setup_)};
  const Kernel& plan = room.effects > 0 ? cutting_plan_ : plan_;
  plan.launch({1}, params, launcher, kOverlapped);
}

void ChunkPrefill::run(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors,
                       void* workspace, gpu::Launcher launcher) const {
  if (Room(setup_, batch).requests == 0) return;
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
  launch(room.effects > 0 ? cut_states_ : states_, tasks_of_states(room.walks()), kStateBlocksPerSm,
         params, launcher);
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
  launch(room.effects > 0 ? cut_states_ : states_, tasks_of_states(room.walks()), kStateBlocksPerSm,
         params, launcher);
}

void ChunkPrefill::run_sums(const ChunkPrefillBatch& batch, const ChunkPrefillTensors& tensors,
                            void* workspace, gpu::Launcher launcher) const {
  const Room room(setup_, batch);
  auto params =
      params_of<SsdPrefillParams>(batch, tensors, Workspace(setup_, room, workspace).plan);
  encode_keys(batch, tensors, params);
  params.log_decay_stride = setup_.kind == RecurrenceKind::lightning ? 0 : setup_.value_heads;
  params.skip = tensors.skip;
  launch(states_, tasks_of_states(room.walks()), kStateBlocksPerSm, params, launcher);
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
