// SPDX-License-Identifier: Apache-2.0
#include "core/check.h"
#include "core/checked_math.h"
#include "core/memory_error.h"
#include "fovea/kv_cache.h"
#include "kvcache/pool_memory.h"

namespace fovea {
namespace {

class PagedKvPool final : public KvPool {
 public:
  PagedKvPool(const KvCacheSpec& spec, int64_t pages, Device device)
      : spec_(spec),
        pages_(pages),
        layout_(kv_pool_layout(spec, pages)),
        memory_(layout_, spec.layers, device, "the KV pool") {}

  const KvCacheSpec& spec() const override { return spec_; }
  int64_t pages() const override { return pages_; }
  Device device() const override { return memory_.device(); }
  KvLayerView layer(int32_t index) const override {
    check_argument(index >= 0 && index < spec_.layers, "layer is {}, the pool has {}", index,
                   spec_.layers);
    return kv_layer_view(layout_, memory_.data(), index);
  }

 private:
  KvCacheSpec spec_;
  int64_t pages_;
  KvPoolLayout layout_;
  PoolMemory memory_;
};

}  // namespace

std::unique_ptr<KvPool> make_kv_pool(const KvCacheSpec& spec, int64_t pages, Device device) {
  check_argument(pages >= 2, "pages is {}, must be at least 2: page 0 is reserved", pages);
  check_argument(spec.window == 0, "window is {}, make_window_kv_pool builds such pools",
                 spec.window);
  return name_memory([&] { return std::make_unique<PagedKvPool>(spec, pages, device); },
                     "a KV pool of {} pages", pages);
}

size_t kv_pool_bytes(const KvCacheSpec& spec, int64_t pages, int64_t full_slots) {
  constexpr const char* kWhat = "the size of the pool";
  return static_cast<size_t>(
      checked_sum(kWhat, {kv_pool_layout(spec, pages).total_bytes,
                          checked_product(kWhat, {full_slots, int64_t{sizeof(int64_t)}})}));
}

}  // namespace fovea
