// SPDX-License-Identifier: Apache-2.0
// Memory of a test and its copy on the GPU. Pointers into one are translated to the other.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "gpu/gpu.h"
#include "support/packed_batch.h"
#include "support/paged_store.h"

namespace fovea::test {

using HostBlocks = std::vector<std::span<std::byte>>;

// One device block per host block, between guard zones that must not be written.
class DeviceMirror {
 public:
  explicit DeviceMirror(HostBlocks blocks);

  // Returns the same place on the device. Null stays null.
  template <typename T>
  T* translate(T* host) const {
    return static_cast<T*>(address_of(const_cast<void*>(static_cast<const void*>(host))));
  }
  // Copy contents. The blocks may differ from those of the constructor but may not be larger.
  void upload(const HostBlocks& blocks) const;
  void download(const HostBlocks& blocks) const;
  ::testing::AssertionResult guards_intact() const;

 private:
  void* address_of(void* host) const;

  HostBlocks blocks_;
  std::vector<gpu::DeviceBuffer> buffers_;
};

// The device copy of a lent pool, which must outlive it.
class DevicePool : public KvPool {
 public:
  explicit DevicePool(LentPool& pool) : host_(pool), mirror_(pool.memory()) {}

  const KvCacheSpec& spec() const override { return host_.spec(); }
  int64_t pages() const override { return host_.pages(); }
  Device device() const override { return {DeviceKind::cuda, 0}; }
  KvLayerView layer(int32_t index) const override;
  std::span<const int64_t> slot_map() const override { return host_.slot_map(); }
  const int64_t* device_slot_map() const override {
    return mirror_.translate(host_.slot_map().data());
  }
  // Copies the bytes to the host's pool.
  void download() const { mirror_.download(host_.memory()); }
  ::testing::AssertionResult guards_intact() const { return mirror_.guards_intact(); }

 private:
  LentPool& host_;
  DeviceMirror mirror_;
};

// The device copy of a batch.
class DeviceBatch {
 public:
  DeviceBatch(PackedBatch& batch, PagedStore* store);

  BatchView view() const;
  LayerTensors tensors() const;
  // Replaces the contents by those of a batch that is not larger.
  void upload(PackedBatch& batch) const { mirror_.upload(batch.memory()); }
  void download(PackedBatch& batch) const { mirror_.download(batch.memory()); }
  ::testing::AssertionResult guards_intact() const { return mirror_.guards_intact(); }

 private:
  PackedBatch& host_;
  DeviceMirror mirror_;
  std::unique_ptr<DeviceMirror> tables_;
};

}  // namespace fovea::test
