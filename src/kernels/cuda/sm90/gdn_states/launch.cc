// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "core/rounding.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/gdn_prefill.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kChunkBlocksPerSm = 3;  // blocks of sm90/gdn_chunks on an SM

// The parts of the workspace, in elements of each.
struct Room {
  int32_t chunks;  // max

  explicit Room(const GdnPrefillSetup& setup)
      : chunks(setup.max_tokens / kGdnChunk + setup.max_requests) {}
};

struct Workspace {
  GdnTerms* terms;
  GdnChunk* chunks;
  int32_t* chunk_begin;

  Workspace(const GdnPrefillSetup& setup, void* at) {
    const auto room = static_cast<size_t>(Room(setup).chunks);
    terms = static_cast<GdnTerms*>(at);
    chunks = reinterpret_cast<GdnChunk*>(terms + room * static_cast<size_t>(setup.value_heads));
    chunk_begin = reinterpret_cast<int32_t*>(chunks + room);
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

size_t GdnPrefill::workspace_bytes(const GdnPrefillSetup& setup) {
  const auto room = static_cast<size_t>(Room(setup).chunks);
  return room * static_cast<size_t>(setup.value_heads) * sizeof(GdnTerms) +
         room * sizeof(GdnChunk) + (static_cast<size_t>(setup.max_requests) + 1) * sizeof(int32_t);
}

GdnPrefill::GdnPrefill(const GdnPrefillSetup& setup, gpu::KernelStore& store) : setup_(setup) {
  const std::vector<gpu::KernelVariant> needed = variants(setup);
  plan_ = Kernel(needed[0], store);
  chunks_ = Kernel(needed[1], store);
  states_ = Kernel(needed[2], store);
}

void GdnPrefill::plan(const GdnPrefillBatch& batch, void* workspace, gpu::Launcher launcher) const {
  const Workspace room(setup_, workspace);
  const GdnPlanParams params = {.q_indptr = batch.q_indptr,
                                .state_slots = batch.state_slots,
                                .chunk_begin = room.chunk_begin,
                                .chunks = room.chunks,
                                .requests = batch.requests,
                                .min_tokens = setup_.min_tokens,
                                .max_chunks = Room(setup_).chunks};
  plan_.launch({1}, params, launcher, kOverlapped);
}

void GdnPrefill::run(const GdnPrefillBatch& batch, const GdnPrefillTensors& tensors,
                     void* workspace, gpu::Launcher launcher) const {
  const Workspace room(setup_, workspace);
  GdnPrefillParams params{};
  encode_rows(tensors.q, setup_.key_heads, tensors.q_token_stride, batch.tokens, maps_.q, params.q);
  encode_rows(tensors.k, setup_.key_heads, tensors.k_token_stride, batch.tokens, maps_.k, params.k);
  encode_rows(tensors.v, setup_.value_heads, tensors.v_token_stride, batch.tokens, maps_.v,
              params.v);
  params.log_decay = tensors.log_decay;
  params.beta = tensors.beta;
  params.q_indptr = batch.q_indptr;
  params.kv_lens = batch.kv_lens;
  params.state_slots = batch.state_slots;
  params.chunk_begin = room.chunk_begin;
  params.chunks = room.chunks;
  params.terms = room.terms;
  params.state = tensors.state;
  params.state_slot_stride = tensors.state_slot_stride;
  params.out = static_cast<uint16_t*>(tensors.out);
  params.out_token_stride = tensors.out_token_stride;
  params.requests = batch.requests;
  params.min_tokens = setup_.min_tokens;
  params.key_heads = setup_.key_heads;
  params.value_heads = setup_.value_heads;
  params.scale = tensors.scale;
  params.l2_normalise = tensors.l2_normalise_qk;
  const int32_t tasks = (batch.tokens / kGdnChunk + batch.requests) * setup_.key_heads;
  const int32_t blocks = std::min(tasks, kChunkBlocksPerSm * setup_.multiprocessors);
  chunks_.launch({static_cast<uint32_t>(blocks)}, params, launcher, kOverlapped);
  const int32_t parts = kGdnDim / states_.row_tile();
  states_.launch(
      {static_cast<uint32_t>(parts * setup_.value_heads), static_cast<uint32_t>(batch.requests)},
      params, launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
