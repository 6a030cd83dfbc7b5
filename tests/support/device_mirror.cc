// SPDX-License-Identifier: Apache-2.0
#include "support/device_mirror.h"

#include <algorithm>
#include <stdexcept>

namespace fovea::test {
namespace {

constexpr size_t kGuard = 4096;
constexpr uint8_t kGuardByte = 0xa5;

}  // namespace

DeviceMirror::DeviceMirror(HostBlocks blocks) : blocks_(std::move(blocks)) {
  for (const auto& block : blocks_) {
    const gpu::DeviceBuffer& buffer = buffers_.emplace_back(block.size() + 2 * kGuard);
    gpu::fill_bytes(buffer.data(), kGuardByte, buffer.bytes(), nullptr);
  }
  upload(blocks_);
}

void DeviceMirror::upload(const HostBlocks& blocks) const {
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].size() > blocks_[i].size()) throw std::logic_error("a block has grown");
    gpu::copy_to_device(buffers_[i].data<std::byte>() + kGuard, blocks[i].data(), blocks[i].size(),
                        nullptr);
  }
  gpu::synchronize(nullptr);
}

void DeviceMirror::download(const HostBlocks& blocks) const {
  for (size_t i = 0; i < blocks.size(); ++i) {
    gpu::copy_to_host(blocks[i].data(), buffers_[i].data<std::byte>() + kGuard, blocks[i].size(),
                      nullptr);
  }
  gpu::synchronize(nullptr);
}

void* DeviceMirror::address_of(void* host) const {
  if (host == nullptr) return nullptr;
  auto* at = static_cast<std::byte*>(host);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const std::byte* begin = blocks_[i].data();
    if (at >= begin && at < begin + blocks_[i].size()) {
      return buffers_[i].data<std::byte>() + kGuard + (at - begin);
    }
  }
  throw std::logic_error("the address is in no mirrored block");
}

::testing::AssertionResult DeviceMirror::guards_intact() const {
  const auto written = [](std::byte byte) { return byte != std::byte{kGuardByte}; };
  for (size_t i = 0; i < buffers_.size(); ++i) {
    std::vector<std::byte> zones(2 * kGuard);
    const auto* begin = buffers_[i].data<std::byte>();
    gpu::copy_to_host(zones.data(), begin, kGuard, nullptr);
    gpu::copy_to_host(zones.data() + kGuard, begin + kGuard + blocks_[i].size(), kGuard, nullptr);
    gpu::synchronize(nullptr);
    if (std::any_of(zones.begin(), zones.end(), written)) {
      return ::testing::AssertionFailure()
             << "memory around block " << i << " of " << blocks_[i].size() << " bytes was written";
    }
  }
  return ::testing::AssertionSuccess();
}

KvLayerView DevicePool::layer(int32_t index) const {
  KvLayerView view = host_.layer(index);
  view.k = mirror_.translate(view.k);
  view.v = mirror_.translate(view.v);
  view.k_scale = mirror_.translate(view.k_scale);
  view.v_scale = mirror_.translate(view.v_scale);
  return view;
}

DeviceBatch::DeviceBatch(PackedBatch& batch, PagedStore* store)
    : host_(batch), mirror_(batch.memory()) {
  if (store != nullptr) tables_ = std::make_unique<DeviceMirror>(store->tables());
}

BatchView DeviceBatch::view() const {
  BatchView view = host_.view();
  // A table is the store's, or one of the batch itself.
  const auto move_table = [&](TokenTable& table) {
    const bool own = table.entries == host_.own_table();
    if (table) table.entries = (own ? mirror_ : *tables_).translate(table.entries);
  };
  const auto move = [this](auto&... arrays) {
    ((arrays =
          arrays.empty() ? arrays : std::span(mirror_.translate(arrays.data()), arrays.size())),
     ...);
  };
  move(view.q_indptr, view.kv_lens, view.request_rows, view.out_slots, view.positions,
       view.masks.tree.ancestors, view.masks.custom.visible, view.masks.custom.indptr,
       view.masks.spans.bounds, view.masks.spans.indptr, view.masks.items.prefix_lens,
       view.masks.items.token_pos, view.cross.lens, view.hints.shared_prefix);
  move_table(view.table);
  move_table(view.cross.table);
  return view;
}

LayerTensors DeviceBatch::tensors() const {
  LayerTensors tensors = host_.tensors();
  for (HeadRows* rows : {&tensors.q, &tensors.mla.q_rope, &tensors.mla.latent, &tensors.mla.k_rope,
                         &tensors.dual_chunk.q_succ, &tensors.dual_chunk.q_inter, &tensors.k,
                         &tensors.v, &tensors.out}) {
    rows->data = mirror_.translate(rows->data);
  }
  tensors.q_scale.data = mirror_.translate(tensors.q_scale.data);
  tensors.lse = NaturalLse(mirror_.translate(tensors.lse.data));
  tensors.scores.sinks = mirror_.translate(tensors.scores.sinks);
  tensors.scores.alibi_slopes = mirror_.translate(tensors.scores.alibi_slopes);
  tensors.rotary.cos = mirror_.translate(tensors.rotary.cos);
  tensors.rotary.sin = mirror_.translate(tensors.rotary.sin);
  tensors.rotary.positions = mirror_.translate(tensors.rotary.positions);
  tensors.rotary.q_norm.weight = mirror_.translate(tensors.rotary.q_norm.weight);
  tensors.rotary.k_norm.weight = mirror_.translate(tensors.rotary.k_norm.weight);
  tensors.mla.weights.w_uk = mirror_.translate(tensors.mla.weights.w_uk);
  tensors.mla.weights.w_uv = mirror_.translate(tensors.mla.weights.w_uv);
  return tensors;
}

}  // namespace fovea::test
