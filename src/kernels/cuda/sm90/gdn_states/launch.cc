// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/chunk_common/launch.h"

#include <algorithm>
#include <vector>

#include "kernels/cuda/family.h"
#include "kernels/cuda/gdn_prefill.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kChunkBlocksPerSm = 3;  // blocks of sm90/gdn_chunks and sm90/kda_chunks on an SM

// The parts of the workspace for one batch.
struct Workspace {
  GdnTerms* terms = nullptr;
  KdaTerms* kda_terms = nullptr;
  GdnPlan plan;
  size_t bytes;

  // Only counts the bytes if `at` is null.
  Workspace(const GdnPrefillSetup& setup, const ChunkRoom& room, void* at) {
    ChunkArrays arrays{at};
    const int64_t count = int64_t{room.chunks} * setup.value_heads;
    if (setup.is_kda) {
      arrays.take(kda_terms, count);
    } else {
      arrays.take(terms, count);
    }
    arrays.take(plan, room);
    bytes = arrays.bytes;
  }
};

ChunkRoom room_of(const GdnPrefillSetup& setup, const GdnPrefillBatch& batch) {
  return {setup.min_tokens, batch.tokens, batch.requests};
}

// Returns what the kernels of gated delta net and of KDA have in common.
template <typename Params>
Params params_of(const GdnPrefillSetup& setup, const GdnPrefillBatch& batch,
                 const GdnPrefillTensors& tensors) {
  Params params{};
  params.log_decay = tensors.log_decay;
  params.beta = tensors.beta;
  params.spans = batch.spans;
  params.state = tensors.state;
  params.state_type = tensors.state_type;
  params.state_slot_stride = tensors.state_slot_stride;
  params.out = tensors.out;
  params.out_token_stride = tensors.out_token_stride;
  params.key_heads = setup.key_heads;
  params.value_heads = setup.value_heads;
  params.scale = tensors.scale;
  params.l2_normalise = tensors.l2_normalise_qk;
  return params;
}

}  // namespace

bool GdnPrefill::serves(const GdnPrefillSetup& setup) {
  return setup.sm == 90 && setup.key_dim == kGdnDim && setup.value_dim == kGdnDim &&
         setup.key_heads > 0 && setup.value_heads % setup.key_heads == 0 &&
         (setup.is_kda || setup.value_heads / setup.key_heads <= kGdnMaxShare);
}

std::vector<gpu::KernelVariant> GdnPrefill::variants(const GdnPrefillSetup& setup) {
  const char* const chunks = setup.is_kda ? "sm90/kda_chunks" : "sm90/gdn_chunks";
  const char* const states = setup.is_kda ? "sm90/kda_states" : "sm90/gdn_states";
  return {make_variant(family("sm90/gdn_plan"), {"256"}, setup.sm),
          make_variant(family(chunks), {"bf16"}, setup.sm),
          make_variant(family(states), {"bf16"}, setup.sm)};
}

size_t GdnPrefill::workspace_bytes(const GdnPrefillSetup& setup, int32_t max_tokens,
                                   int32_t max_requests) {
  return Workspace(setup, {setup.min_tokens, max_tokens, max_requests}, nullptr).bytes;
}

GdnPrefill::GdnPrefill(const GdnPrefillSetup& setup, gpu::KernelStore& store) : setup_(setup) {
  const std::vector<gpu::KernelVariant> needed = variants(setup);
  plan_ = Kernel(needed[0], store);
  chunks_ = Kernel(needed[1], store);
  states_ = Kernel(needed[2], store);
}

void GdnPrefill::plan(const GdnPrefillBatch& batch, void* workspace, gpu::Launcher launcher) const {
  const ChunkRoom room = room_of(setup_, batch);
  const GdnPlanParams params = {.plan = Workspace(setup_, room, workspace).plan,
                                .spans = batch.spans,
                                .requests = batch.requests,
                                .max_chunks = room.chunks,
                                .max_walks = room.walks};
  plan_.launch({1}, params, launcher, kOverlapped);
}

void GdnPrefill::run(const GdnPrefillBatch& batch, const GdnPrefillTensors& tensors,
                     void* workspace, gpu::Launcher launcher) const {
  if (room_of(setup_, batch).walks == 0) return;
  if (setup_.is_kda) {
    run_kda(batch, tensors, workspace, launcher);
  } else {
    run_gdn(batch, tensors, workspace, launcher);
  }
}

void GdnPrefill::run_gdn(const GdnPrefillBatch& batch, const GdnPrefillTensors& tensors,
                         void* workspace, gpu::Launcher launcher) const {
  const ChunkRoom room = room_of(setup_, batch);
  const Workspace parts(setup_, room, workspace);
  auto params = params_of<GdnPrefillParams>(setup_, batch, tensors);
  const int64_t keys = int64_t{setup_.key_heads} * kGdnDim;
  encode_rows(tensors.q, keys, tensors.q_token_stride, batch.tokens, maps_.q, params.q);
  encode_rows(tensors.k, keys, tensors.k_token_stride, batch.tokens, maps_.k, params.k);
  encode_rows(tensors.v, int64_t{setup_.value_heads} * kGdnDim, tensors.v_token_stride,
              batch.tokens, maps_.v, params.v);
  params.plan = parts.plan;
  params.terms = parts.terms;
  launch(int64_t{room.chunks} * setup_.key_heads, room.walks, params, launcher);
}

void GdnPrefill::run_kda(const GdnPrefillBatch& batch, const GdnPrefillTensors& tensors,
                         void* workspace, gpu::Launcher launcher) const {
  const ChunkRoom room = room_of(setup_, batch);
  const Workspace parts(setup_, room, workspace);
  auto params = params_of<KdaPrefillParams>(setup_, batch, tensors);
  params.q = static_cast<const uint16_t*>(tensors.q);
  params.k = static_cast<const uint16_t*>(tensors.k);
  params.q_token_stride = tensors.q_token_stride;
  params.k_token_stride = tensors.k_token_stride;
  encode_rows(tensors.v, int64_t{setup_.value_heads} * kGdnDim, tensors.v_token_stride,
              batch.tokens, maps_.v, params.v);
  params.plan = parts.plan;
  params.terms = parts.kda_terms;
  launch(int64_t{room.chunks} * setup_.value_heads, room.walks, params, launcher);
}

template <typename Params>
void GdnPrefill::launch(int64_t tasks, int32_t walks, const Params& params,
                        gpu::Launcher launcher) const {
  const auto blocks = [&](int64_t count, int32_t per_sm) {
    return static_cast<uint32_t>(std::min<int64_t>(count, per_sm * setup_.multiprocessors));
  };
  chunks_.launch({blocks(tasks, kChunkBlocksPerSm)}, params, launcher, kOverlapped);
  const int64_t parts_of_a_head = kGdnDim / states_.row_tile();
  states_.launch({blocks(walks * parts_of_a_head * setup_.value_heads, kStateBlocksPerSm)}, params,
                 launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
