// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/cuda/family.h"
#include "kernels/cuda/gdn_prefill.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kChunkBlocksPerSm = 3;  // blocks of sm90/gdn_chunks on an SM
// Blocks of sm90/gdn_states for each SM, of which one runs. Several, so that SMs with short
// requests get more of them; not one for each task, because most have none in a batch of many
// decodes.
constexpr int32_t kStateBlocksPerSm = 8;

// Room for the chunks of a batch: the maximum of requests that are in_chunks, and of their chunks.
struct Room {
  int32_t walks, chunks;

  Room(const GdnPrefillSetup& setup, int32_t tokens, int32_t requests)
      : walks(std::min(requests, tokens / setup.min_tokens)), chunks(tokens / kGdnChunk + walks) {}
  Room(const GdnPrefillSetup& setup, const GdnPrefillBatch& batch)
      : Room(setup, batch.tokens, batch.requests) {}
};

// The parts of the workspace for one batch.
struct Workspace {
  GdnTerms* terms;
  GdnPlan plan;
  size_t bytes = 0;

  // Only counts the bytes if `at` is null.
  Workspace(const GdnPrefillSetup& setup, const Room& room, void* at) {
    const auto take = [&]<typename T>(T*& part, int64_t count) {
      part = at == nullptr ? nullptr : reinterpret_cast<T*>(static_cast<std::byte*>(at) + bytes);
      bytes += static_cast<size_t>(count) * sizeof(T);
    };
    take(terms, int64_t{room.chunks} * setup.value_heads);
    take(plan.walks, room.walks);
    take(plan.chunks, room.chunks);
    take(plan.counts, 1);
  }
};

void encode_rows(const void* data, int32_t heads, int64_t token_stride, int32_t tokens,
                 gpu::RepeatedTensorMap& repeated, TensorMap& map) {
  repeated.encode({.data = data,
                   .rank = 2,
                   .sizes = {static_cast<uint64_t>(heads) * kGdnDim, static_cast<uint64_t>(tokens)},
                   .strides = {static_cast<uint64_t>(token_stride) * sizeof(uint16_t)},
                   .box = {kGdnBoxWidth, kGdnBoxRows}},
                  &map);
}

}  // namespace

bool GdnPrefill::serves(const GdnPrefillSetup& setup) {
  return setup.sm == 90 && setup.key_dim == kGdnDim && setup.value_dim == kGdnDim &&
         setup.key_heads > 0 && setup.value_heads % setup.key_heads == 0 &&
         setup.value_heads / setup.key_heads <= kGdnMaxShare;
}

std::vector<gpu::KernelVariant> GdnPrefill::variants(const GdnPrefillSetup& setup) {
  return {make_variant(family("sm90/gdn_plan"), {"256"}, setup.sm),
          make_variant(family("sm90/gdn_chunks"), {"bf16"}, setup.sm),
          make_variant(family("sm90/gdn_states"), {"bf16"}, setup.sm)};
}

size_t GdnPrefill::workspace_bytes(const GdnPrefillSetup& setup, int32_t max_tokens,
                                   int32_t max_requests) {
  return Workspace(setup, {setup, max_tokens, max_requests}, nullptr).bytes;
}

GdnPrefill::GdnPrefill(const GdnPrefillSetup& setup, gpu::KernelStore& store) : setup_(setup) {
  const std::vector<gpu::KernelVariant> needed = variants(setup);
  plan_ = Kernel(needed[0], store);
  chunks_ = Kernel(needed[1], store);
  states_ = Kernel(needed[2], store);
}

void GdnPrefill::plan(const GdnPrefillBatch& batch, void* workspace, gpu::Launcher launcher) const {
  const Room room(setup_, batch);
  const GdnPlanParams params = {.plan = Workspace(setup_, room, workspace).plan,
                                .spans = batch.spans,
                                .requests = batch.requests,
                                .max_chunks = room.chunks,
                                .max_walks = room.walks};
  plan_.launch({1}, params, launcher, kOverlapped);
}

void GdnPrefill::run(const GdnPrefillBatch& batch, const GdnPrefillTensors& tensors,
                     void* workspace, gpu::Launcher launcher) const {
  const Room room(setup_, batch);
  if (room.walks == 0) return;
  const Workspace parts(setup_, room, workspace);
  GdnPrefillParams params{};
  encode_rows(tensors.q, setup_.key_heads, tensors.q_token_stride, batch.tokens, maps_.q, params.q);
  encode_rows(tensors.k, setup_.key_heads, tensors.k_token_stride, batch.tokens, maps_.k, params.k);
  encode_rows(tensors.v, setup_.value_heads, tensors.v_token_stride, batch.tokens, maps_.v,
              params.v);
  params.log_decay = tensors.log_decay;
  params.beta = tensors.beta;
  params.spans = batch.spans;
  params.plan = parts.plan;
  params.terms = parts.terms;
  params.state = tensors.state;
  params.state_type = tensors.state_type;
  params.state_slot_stride = tensors.state_slot_stride;
  params.out = tensors.out;
  params.out_token_stride = tensors.out_token_stride;
  params.key_heads = setup_.key_heads;
  params.value_heads = setup_.value_heads;
  params.scale = tensors.scale;
  params.l2_normalise = tensors.l2_normalise_qk;
  const auto blocks = [&](int64_t tasks, int32_t per_sm) {
    return static_cast<uint32_t>(std::min<int64_t>(tasks, per_sm * setup_.multiprocessors));
  };
  chunks_.launch({blocks(int64_t{room.chunks} * setup_.key_heads, kChunkBlocksPerSm)}, params,
                 launcher, kOverlapped);
  const int64_t parts_of_a_head = kGdnDim / states_.row_tile();
  states_.launch({blocks(room.walks * parts_of_a_head * setup_.value_heads, kStateBlocksPerSm)},
                 params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
