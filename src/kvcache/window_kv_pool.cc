// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "core/check.h"
#include "core/memory_error.h"
#include "fovea/kv_cache.h"
#include "kvcache/pool_memory.h"

namespace fovea {
namespace {

class PagedWindowKvPool final : public WindowKvPool {
 public:
  PagedWindowKvPool(const KvCacheSpec& spec, int64_t pages, int64_t full_slots, Device device)
      : spec_(spec),
        pages_(pages),
        layout_(kv_pool_layout(spec, pages)),
        memory_(layout_, spec.layers, device, "the window KV pool"),
        slot_map_(static_cast<size_t>(full_slots), -1),
        window_page_(static_cast<size_t>(full_slots / spec.page_size)),
        live_(static_cast<size_t>(pages)) {
    for (int64_t slot = 0; slot < spec.page_size; ++slot) slot_map_[slot] = slot;
    if (memory_.context() != nullptr) {
      device_map_ = gpu::DeviceBuffer(slot_map_.size() * sizeof(int64_t));
      changed_ = {0, full_slots};
      publish(nullptr);
      gpu::synchronize(nullptr);
    }
    free_.reserve(static_cast<size_t>(pages) - 1);
    for (int64_t page = pages - 1; page > 0; --page) free_.push_back(static_cast<int32_t>(page));
  }

  const KvCacheSpec& spec() const override { return spec_; }
  int64_t pages() const override { return pages_; }
  int64_t free_pages() const override { return static_cast<int64_t>(free_.size()); }
  ~PagedWindowKvPool() override {
    if (memory_.context() != nullptr) memory_.context()->bind_to_free();
  }

  Device device() const override { return memory_.device(); }
  std::span<const int64_t> slot_map() const override { return slot_map_; }
  const int64_t* device_slot_map() const override {
    return memory_.context() != nullptr ? device_map_.data<int64_t>() : slot_map_.data();
  }
  KvLayerView layer(int32_t index) const override {
    check_argument(index >= 0 && index < spec_.layers, "layer is {}, the pool has {}", index,
                   spec_.layers);
    return kv_layer_view(layout_, memory_.data(), index);
  }

  bool map(std::span<const int64_t> full_slots) override {
    for (const int64_t slot : full_slots) check_slot(slot);
    if (!take_pages(full_slots)) return false;
    for (const int64_t slot : full_slots) {
      int64_t& target = slot_map_[slot];
      if (target >= 0) continue;
      const int64_t page = window_page_[slot / spec_.page_size];
      target = page * spec_.page_size + slot % spec_.page_size;
      changed_.add(slot);
      ++live_[page];
    }
    return true;
  }

  // Copies everything between the first and the last change, 8 bytes per slot. The source is
  // pageable, so the driver has read it when the call returns.
  void publish(Stream stream) override {
    if (memory_.context() == nullptr || changed_.begin >= changed_.end) return;
    memory_.context()->bind();
    const auto first = changed_.begin;
    gpu::copy_to_device(device_map_.data<int64_t>() + first, slot_map_.data() + first,
                        static_cast<size_t>(changed_.end - first) * sizeof(int64_t), stream);
    changed_ = {};
  }

  void unmap(std::span<const int64_t> full_slots) override { unmap_all(full_slots); }
  void unmap(std::span<const int32_t> full_slots) override { unmap_all(full_slots); }
  void unmap_pages(std::span<const int64_t> full_pages) override {
    for (const int64_t page : full_pages) {
      const int64_t first = page * spec_.page_size;
      check_slot(first);
      for (int64_t slot = first; slot < first + spec_.page_size; ++slot) unmap_slot(slot);
    }
  }

 private:
  // Range of slots whose entries the device has not seen yet.
  struct Changed {
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
    void add(int64_t slot) {
      begin = std::min(begin, slot);
      end = std::max(end, slot + 1);
    }
  };

  void check_slot(int64_t slot) const {
    check_argument(slot >= spec_.page_size && slot < full_slots(),
                   "slot {} is outside [{}, {}), the slots of the full pool", slot, spec_.page_size,
                   full_slots());
  }
  int64_t full_slots() const { return static_cast<int64_t>(slot_map_.size()); }

  // Assigns a window page to every full page that needs one. Assigns none if too few are free.
  bool take_pages(std::span<const int64_t> full_slots) {
    for (size_t i = 0; i < full_slots.size(); ++i) {
      int32_t& page = window_page_[full_slots[i] / spec_.page_size];
      if (page != 0) continue;
      if (free_.empty()) {
        for (const int64_t slot : full_slots.first(i)) drop_if_empty(slot / spec_.page_size);
        return false;
      }
      page = free_.back();
      free_.pop_back();
    }
    return true;
  }

  void drop_if_empty(int64_t full_page) {
    int32_t& page = window_page_[full_page];
    if (page == 0 || live_[page] > 0) return;
    free_.push_back(page);
    page = 0;
  }

  void unmap_slot(int64_t slot) {
    if (slot_map_[slot] < 0) return;
    slot_map_[slot] = -1;
    changed_.add(slot);
    const int64_t full_page = slot / spec_.page_size;
    --live_[window_page_[full_page]];
    drop_if_empty(full_page);
  }

  template <typename Slot>
  void unmap_all(std::span<const Slot> full_slots) {
    for (const int64_t slot : full_slots) {
      check_slot(slot);
      unmap_slot(slot);
    }
  }

  KvCacheSpec spec_;
  int64_t pages_;
  KvPoolLayout layout_;
  PoolMemory memory_;
  std::vector<int64_t> slot_map_;
  gpu::DeviceBuffer device_map_;  // slot_map_ on the GPU at the last publish()
  Changed changed_;
  std::vector<int32_t> window_page_;  // [full pages] window page, 0 for none
  std::vector<int32_t> live_;         // [pages] number of mapped slots
  std::vector<int32_t> free_;
};

}  // namespace

std::unique_ptr<WindowKvPool> make_window_kv_pool(const KvCacheSpec& spec, int64_t pages,
                                                  int64_t full_slots, Device device) {
  check_argument(pages >= 2, "pages is {}, must be at least 2: page 0 is reserved", pages);
  check_argument(spec.window > 0, "window is {}, must be positive", spec.window);
  check_argument(spec.page_size > 0, "page_size is {}, must be positive", spec.page_size);
  check_argument(full_slots >= 2 * int64_t{spec.page_size} && full_slots <= INT32_MAX &&
                     full_slots % spec.page_size == 0,
                 "full_slots is {}, must be at least two pages, a multiple of page_size {} and "
                 "below 2^31: slots are 32-bit",
                 full_slots, spec.page_size);
  return name_memory(
      [&] { return std::make_unique<PagedWindowKvPool>(spec, pages, full_slots, device); },
      "a window KV pool of {} pages over {} slots", pages, full_slots);
}

int32_t usable_window_prefix(const WindowKvPool& pool, std::span<const int64_t> full_pages) {
  const int32_t page_size = pool.spec().page_size;
  const int64_t window = pool.spec().window;
  const std::span<const int64_t> map = pool.slot_map();
  int64_t mapped = 0;  // length of the mapped run that ends here
  int64_t usable = 0;
  int64_t length = 0;
  const int64_t pages = static_cast<int64_t>(map.size()) / page_size;
  for (const int64_t page : full_pages) {
    check_argument(page >= 0 && page < pages, "page {} is outside [0, {}), the full pool's", page,
                   pages);
    for (const int64_t slot : map.subspan(static_cast<size_t>(page * page_size), page_size)) {
      mapped = slot >= 0 ? mapped + 1 : 0;
    }
    length += page_size;
    if (mapped >= std::min(window - 1, length)) usable = length;
  }
  return static_cast<int32_t>(usable);
}

}  // namespace fovea
