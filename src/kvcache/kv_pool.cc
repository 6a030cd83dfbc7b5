// SPDX-License-Identifier: Apache-2.0
#include "core/check.h"
#include "fovea/kv_cache.h"
#include "kvcache/pool_layout.h"
#include "kvcache/zeroed_memory.h"

namespace fovea {
namespace {

class CpuKvPool final : public KvPool {
 public:
  CpuKvPool(const KvCacheSpec& spec, int64_t pages)
      : spec_(spec),
        pages_(pages),
        layout_(kv_pool_layout(spec, pages)),
        memory_(layout_.total_bytes, "the KV pool") {
    initialise_scales(layout_, memory_.data(), spec.layers);
  }

  const KvCacheSpec& spec() const override { return spec_; }
  int64_t pages() const override { return pages_; }
  KvLayerView layer(int32_t index) const override {
    check_argument(index >= 0 && index < spec_.layers, "layer is {}, the pool has {}", index,
                   spec_.layers);
    return kv_layer_view(layout_, memory_.data(), index);
  }

 private:
  KvCacheSpec spec_;
  int64_t pages_;
  KvPoolLayout layout_;
  ZeroedMemory memory_;
};

}  // namespace

std::unique_ptr<KvPool> make_kv_pool(const KvCacheSpec& spec, int64_t pages) {
  check_argument(pages >= 2, "pages is {}, must be at least 2: page 0 is reserved", pages);
  check_argument(spec.window == 0, "window is {}, make_window_kv_pool builds such pools",
                 spec.window);
  return std::make_unique<CpuKvPool>(spec, pages);
}

size_t kv_pool_bytes(const KvCacheSpec& spec, int64_t pages, int64_t full_slots) {
  constexpr const char* kWhat = "the size of the pool";
  return static_cast<size_t>(
      checked_sum(kWhat, {kv_pool_layout(spec, pages).total_bytes,
                          checked_product(kWhat, {full_slots, int64_t{sizeof(int64_t)}})}));
}

}  // namespace fovea
