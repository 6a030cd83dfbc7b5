// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/checked_math.h"
#include "core/memory_error.h"
#include "fovea/kv_cache.h"
#include "kvcache/pool_layout.h"
#include "kvcache/pool_memory.h"

namespace fovea {
namespace {

constexpr const char* kWhat = "the size of the state pool";

// Elements in one slot of one layer.
struct SlotSize {
  int64_t conv, state, drafts;
};

int64_t draft_rows(const StateCacheSpec& spec) {
  check_argument(spec.max_drafts >= 0 && spec.max_drafts <= kMaxSlotDrafts,
                 "max_drafts is {}, must be in [0, {}]", spec.max_drafts, kMaxSlotDrafts);
  check_argument((spec.draft_inputs > 0) == (spec.max_drafts > 0) && spec.draft_inputs >= 0,
                 "draft_inputs is {}, must be {} with max_drafts {}", spec.draft_inputs,
                 spec.max_drafts > 0 ? "positive" : "0", spec.max_drafts);
  // The next pass takes over as many as it may bring itself.
  return 2 * int64_t{spec.max_drafts};
}

int64_t mark_bytes(const StateCacheSpec& spec) {
  return spec.max_drafts > 0 ? int64_t{sizeof(StateMark)} : 0;
}

// Checks the widths of a state. Layers that have only windows have none.
void check_extents(const StateCacheSpec& spec) {
  const bool none = spec.heads == 0 && spec.rows == 0 && spec.columns == 0;
  if (none && spec.conv_dim > 0 && spec.conv_width > 1) return;
  check_argument(spec.heads > 0, "heads is {}, must be positive", spec.heads);
  check_argument(spec.rows > 0, "rows is {}, must be positive", spec.rows);
  check_argument(spec.columns > 0, "columns is {}, must be positive", spec.columns);
}

SlotSize slot_size(const StateCacheSpec& spec) {
  check_argument(spec.layers > 0, "layers is {}, must be positive", spec.layers);
  check_argument(spec.conv_dim >= 0, "conv_dim is {}, must not be negative", spec.conv_dim);
  check_argument(spec.conv_width >= 1, "conv_width is {}, must be positive", spec.conv_width);
  check_extents(spec);
  check_argument(spec.dtype == DType::f32 || spec.dtype == DType::bf16 || spec.dtype == DType::f16,
                 "dtype is {}, states are {}, {} or {}", dtype_name(spec.dtype),
                 dtype_name(DType::f32), dtype_name(DType::bf16), dtype_name(DType::f16));
  return {int64_t{spec.conv_dim} * (spec.conv_width - 1),
          checked_product(kWhat, {spec.heads, spec.rows, spec.columns}),
          checked_product(kWhat, {draft_rows(spec), spec.draft_inputs})};
}

class SlotStatePool final : public StatePool {
 public:
  SlotStatePool(const StateCacheSpec& spec, int32_t slots, Device device)
      : spec_(spec),
        slots_(slots),
        slot_(slot_size(spec)),
        conv_bytes_(array_bytes(slot_.conv, DType::f32)),
        drafts_at_(checked_sum(kWhat, {conv_bytes_, array_bytes(slot_.state, spec.dtype)})),
        layer_bytes_(checked_sum(kWhat, {drafts_at_, array_bytes(slot_.drafts, DType::f32)})),
        marks_at_(checked_product(kWhat, {layer_bytes_, spec.layers})),
        memory_(checked_sum(kWhat, {marks_at_, mark_bytes(spec) * slots}), device,
                "the state pool"),
        in_use_(static_cast<size_t>(slots)),
        used_before_(static_cast<size_t>(slots)) {
    free_.reserve(static_cast<size_t>(slots));
    for (int32_t slot = slots - 1; slot > 0; --slot) free_.push_back(slot);
  }

  const StateCacheSpec& spec() const override { return spec_; }
  int32_t slots() const override { return slots_; }
  Device device() const override { return memory_.device(); }
  int32_t free_slots() const override { return static_cast<int32_t>(free_.size()); }

  bool in_use(int32_t slot) const override {
    return slot > 0 && slot < slots_ && in_use_[static_cast<size_t>(slot)];
  }

  StateLayerView layer(int32_t index) const override {
    check_argument(index >= 0 && index < spec_.layers, "layer is {}, the state pool has {}", index,
                   spec_.layers);
    return view(index);
  }

  StateMark* marks() const override {
    if (spec_.max_drafts == 0) return nullptr;
    return reinterpret_cast<StateMark*>(memory_.data() + marks_at_);
  }

  std::optional<int32_t> allocate() override {
    if (free_.empty()) return std::nullopt;
    const int32_t slot = free_.back();
    const auto index = static_cast<size_t>(slot);
    if (used_before_[index]) change({kZeros, slot});
    free_.pop_back();
    used_before_[index] = in_use_[index] = true;
    return slot;
  }

  void release(int32_t slot) override {
    check_in_use(slot);
    in_use_[static_cast<size_t>(slot)] = false;
    free_.push_back(slot);
  }

  void copy(int32_t from, int32_t to) override {
    check_in_use(from);
    check_in_use(to);
    if (from != to) change({from, to});
  }

  void publish(Stream stream) override {
    if (changes_.empty()) return;
    memory_.context()->bind();
    for (const Change& change : changes_) {
      apply(
          change, [&](void* to, size_t bytes) { gpu::fill_bytes(to, 0, bytes, stream); },
          [&](void* to, const void* from, size_t bytes) {
            gpu::copy_on_device(to, from, bytes, stream);
          });
    }
    changes_.clear();
  }

 private:
  static constexpr int32_t kZeros = -1;
  struct Change {
    int32_t from, to;  // from kZeros: clears the slot
  };

  // Changes a slot in all layers: on a GPU by the next publish().
  void change(const Change& change) {
    if (memory_.context() == nullptr) {
      apply(
          change, [](void* to, size_t bytes) { std::memset(to, 0, bytes); },
          [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); });
      return;
    }
    // A new slot that becomes a copy at once needs no zeros.
    const bool replaces =
        !changes_.empty() && changes_.back().from == kZeros && changes_.back().to == change.to;
    if (replaces) {
      changes_.back() = change;
    } else {
      changes_.push_back(change);
    }
  }

  template <typename Clear, typename Copy>
  void apply(const Change& change, const Clear& clear, const Copy& copy) const {
    const auto apply_to = [&](void* array, int64_t bytes) {
      char* const first = static_cast<char*>(array);
      char* const to = first + change.to * bytes;
      if (change.from == kZeros) {
        clear(to, static_cast<size_t>(bytes));
      } else {
        copy(to, first + change.from * bytes, static_cast<size_t>(bytes));
      }
    };
    for (int32_t i = 0; i < spec_.layers; ++i) {
      const StateLayerView layer = view(i);
      apply_to(layer.conv, slot_bytes(slot_.conv, DType::f32));
      apply_to(layer.state, slot_bytes(slot_.state, spec_.dtype));
      // A mark of zeros says that there are no drafts, so their inputs may stay.
      const bool has_drafts = spec_.max_drafts > 0 && change.from != kZeros;
      if (has_drafts) apply_to(layer.drafts, slot_bytes(slot_.drafts, DType::f32));
    }
    if (spec_.max_drafts > 0) apply_to(marks(), mark_bytes(spec_));
  }

  static int64_t slot_bytes(int64_t elements, DType dtype) {
    return elements * static_cast<int64_t>(dtype_bytes(dtype));
  }

  int64_t array_bytes(int64_t elements_per_slot, DType dtype) const {
    return align_up(kWhat, checked_product(kWhat, {elements_per_slot, slots_,
                                                   static_cast<int64_t>(dtype_bytes(dtype))}));
  }

  StateLayerView view(int32_t index) const {
    char* base = memory_.data() + index * layer_bytes_;
    StateLayerView layer;
    layer.conv = reinterpret_cast<float*>(base);
    layer.state = base + conv_bytes_;
    layer.conv_slot_stride = slot_.conv;
    layer.state_slot_stride = slot_.state;
    layer.slots = slots_;
    if (spec_.max_drafts > 0) layer.drafts = reinterpret_cast<float*>(base + drafts_at_);
    return layer;
  }

  void check_in_use(int32_t slot) const {
    check_argument(in_use(slot), "state slot {} of [1, {}) is not in use", slot, slots_);
  }

  StateCacheSpec spec_;
  int32_t slots_;
  SlotSize slot_;
  int64_t conv_bytes_;
  int64_t drafts_at_;
  int64_t layer_bytes_;
  int64_t marks_at_;
  PoolMemory memory_;
  std::vector<int32_t> free_;
  std::vector<bool> in_use_;
  std::vector<bool> used_before_;  // false while the zeros of the beginning are untouched
  std::vector<Change> changes_;    // on a GPU, since the last publish()
};

}  // namespace

size_t StateCacheSpec::bytes_per_slot() const {
  const SlotSize slot = slot_size(*this);
  const auto state_bytes = static_cast<int64_t>(dtype_bytes(dtype));
  const int64_t layer =
      checked_sum(kWhat, {checked_product(kWhat, {slot.conv, int64_t{sizeof(float)}}),
                          checked_product(kWhat, {slot.state, state_bytes}),
                          checked_product(kWhat, {slot.drafts, int64_t{sizeof(float)}})});
  return static_cast<size_t>(
      checked_sum(kWhat, {checked_product(kWhat, {layer, layers}), mark_bytes(*this)}));
}

std::unique_ptr<StatePool> make_state_pool(const StateCacheSpec& spec, int32_t slots,
                                           Device device) {
  check_argument(slots >= 2, "slots is {}, must be at least 2: slot 0 is reserved", slots);
  return name_memory([&] { return std::make_unique<SlotStatePool>(spec, slots, device); },
                     "a state pool of {} slots", slots);
}

}  // namespace fovea
