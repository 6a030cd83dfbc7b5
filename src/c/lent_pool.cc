// SPDX-License-Identifier: Apache-2.0
#include "c/lent_pool.h"

#include <string>
#include <vector>

#include "c/arguments.h"
#include "c/specs.h"
#include "c/tensors.h"

namespace fovea::c {
namespace {

constexpr int32_t kRowBytes = 656;  // KvLayout::mla_fp8_rows

struct LentSlotMap {
  std::span<const int64_t> host;
  const int64_t* device = nullptr;
};

class LentPool final : public KvPool {
 public:
  LentPool(const KvCacheSpec& spec, Device device, std::vector<KvLayerView> layers, LentSlotMap map,
           bool reserves_page_zero)
      : spec_(spec),
        device_(device),
        layers_(std::move(layers)),
        map_(map),
        reserves_page_zero_(reserves_page_zero) {}

  const KvCacheSpec& spec() const override { return spec_; }
  int64_t pages() const override { return layers_.front().slots / spec_.page_size; }
  bool reserves_page_zero() const override { return reserves_page_zero_; }
  Device device() const override { return device_; }
  std::span<const int64_t> slot_map() const override { return map_.host; }
  const int64_t* device_slot_map() const override { return map_.device; }
  KvLayerView layer(int32_t index) const override {
    check(index >= 0 && index < spec_.layers, "layer is {}, the pool has {}", index, spec_.layers);
    return layers_[static_cast<size_t>(index)];
  }

 private:
  KvCacheSpec spec_;
  Device device_;
  std::vector<KvLayerView> layers_;
  LentSlotMap map_;
  bool reserves_page_zero_;
};

// Address and strides of K or V, in elements.
struct LentRows {
  char* data = nullptr;
  int64_t pages = 0;
  int64_t page_stride = 0, token_stride = 0, head_stride = 0;
};

void check_extent(const TensorView& view, std::string_view name, int32_t dimension, int64_t wanted,
                  std::string_view field) {
  check(view.shape[dimension] == wanted, "{}: shape[{}] is {}, must be {} = {}", name, dimension,
        view.shape[dimension], field, wanted);
}

void check_cache_type(const DLTensor& tensor, std::string_view name, const KvCacheSpec& spec) {
  if (spec.layout == KvLayout::mla_fp8_rows)
    return check_type(tensor, name, element_type<uint8_t>());
  const DType dtype = dtype_of(tensor, name);
  check(dtype == spec.dtype, "{} is {}, the spec's dtype is {}", name, dtype_name(dtype),
        dtype_name(spec.dtype));
}

// Reads K or V with a dimension of heads.
LentRows head_memory(const DLTensor& tensor, TensorName argument, const KvCacheSpec& spec,
                     int32_t dim) {
  const bool by_head = spec.order == KvOrder::hnd;
  const int32_t token = by_head ? 2 : 1, head = by_head ? 1 : 2;
  const TensorView view = view_tensor(
      tensor, argument, 4,
      by_head ? "[pages, kv_heads, page_size, dim]" : "[pages, page_size, kv_heads, dim]");
  check_extent(view, argument.name, token, spec.page_size, "page_size");
  check_extent(view, argument.name, head, spec.kv_heads, "kv_heads");
  check_extent(view, argument.name, 3, dim, "the width of a head");
  check_dense(view, argument.name, 3, 4);
  return {view.data, view.shape[0], view.strides[0], view.strides[token], view.strides[head]};
}

// Reads the rows of MLA layers.
LentRows latent_memory(const DLTensor& tensor, TensorName argument, const KvCacheSpec& spec) {
  const int32_t width = spec.layout == KvLayout::mla_fp8_rows ? kRowBytes : spec.head_dim;
  const TensorView view = view_tensor(tensor, argument, 3, "[pages, page_size, width of a row]");
  check_extent(view, argument.name, 1, spec.page_size, "page_size");
  check_extent(view, argument.name, 2, width, "the width of a row");
  check_dense(view, argument.name, 2, 3);
  return {view.data, view.shape[0], view.strides[0], view.strides[1], width};
}

float* lent_scale(const DLTensor* tensor, TensorName argument, const KvCacheSpec& spec,
                  int64_t slots) {
  check((tensor != nullptr) == (spec.scale != KvScale::none),
        "{} is {}, but the spec's scale is {}", argument.name, tensor != nullptr ? "given" : "null",
        static_cast<int>(spec.scale));
  const int64_t per_slot[] = {slots, spec.kv_heads}, heads[] = {spec.kv_heads}, one[] = {1};
  const std::span<const int64_t> shape =
      spec.scale == KvScale::per_token_head ? std::span<const int64_t>(per_slot)
      : spec.scale == KvScale::per_head     ? std::span<const int64_t>(heads)
                                            : std::span<const int64_t>(one);
  return const_cast<float*>(dense_floats(tensor, argument, shape));
}

KvLayerView lent_layer(const fovea_kv_memory& memory, const KvCacheSpec& spec, Device device,
                       int32_t index) {
  const auto name = [&](const char* field) { return fmt::format("layers[{}].{}", index, field); };
  const bool separate = spec.layout == KvLayout::mha;
  check(memory.k != nullptr, "{} is null", name("k"));
  check((memory.v != nullptr) == separate, "{} is {}, but the layout is {}", name("v"),
        memory.v != nullptr ? "given" : "null", separate ? "mha" : "mla");
  const std::string k_name = name("k"), v_name = name("v");
  check_cache_type(*memory.k, k_name, spec);
  if (separate) check_cache_type(*memory.v, v_name, spec);
  const LentRows k = separate ? head_memory(*memory.k, {k_name, device}, spec, spec.head_dim)
                              : latent_memory(*memory.k, {k_name, device}, spec);
  const LentRows v = separate ? head_memory(*memory.v, {v_name, device}, spec, spec.head_dim_v) : k;
  check(v.pages == k.pages, "{} has {} pages, {} has {}", v_name, v.pages, k_name, k.pages);
  check(k.pages <= INT32_MAX / spec.page_size, "{} has {} pages, at most {}: slots are 32-bit",
        k_name, k.pages, INT32_MAX / spec.page_size);
  KvLayerView view{.layout = spec.layout, .scale = spec.scale, .dtype = spec.dtype};
  view.page_size = spec.page_size;
  view.slots = k.pages * spec.page_size;
  view.k = k.data;
  view.v = v.data;
  view.k_page_stride = k.page_stride;
  view.k_token_stride = k.token_stride;
  view.k_head_stride = k.head_stride;
  view.v_page_stride = v.page_stride;
  view.v_token_stride = v.token_stride;
  view.v_head_stride = v.head_stride;
  view.k_scale = lent_scale(memory.k_scale, {name("k_scale"), device}, spec, view.slots);
  check(separate || memory.v_scale == nullptr, "{} is given, but the layout is mla",
        name("v_scale"));
  view.v_scale = separate ? lent_scale(memory.v_scale, {name("v_scale"), device}, spec, view.slots)
                          : view.k_scale;
  return view;
}

LentSlotMap lent_slot_map(const fovea_lent_pool& lent, const KvCacheSpec& spec, Device device) {
  check((lent.slot_map != nullptr) == (spec.window > 0),
        "slot_map is {}, but the spec's window is {}", lent.slot_map != nullptr ? "given" : "null",
        spec.window);
  const bool on_gpu = device.kind != DeviceKind::cpu;
  check((lent.device_slot_map != nullptr) == (on_gpu && spec.window > 0),
        "device_slot_map is {}, but the pool is on {} and its window is {}",
        lent.device_slot_map != nullptr ? "given" : "null", device_name(device), spec.window);
  LentSlotMap map{dense_array<int64_t>(lent.slot_map, {"slot_map"})};
  map.device = on_gpu
                   ? dense_array<int64_t>(lent.device_slot_map, {"device_slot_map", device}).data()
                   : map.host.data();
  return map;
}

}  // namespace

std::shared_ptr<KvPool> make_lent_pool(const fovea_lent_pool* lent) {
  const fovea_lent_pool from = read_struct(lent, kDefaultLentPool, "lent");
  const bool reserves_page_zero = to_flag(from.reserves_page_zero, "lent.reserves_page_zero");
  const KvCacheSpec spec = to_spec(from.spec, "lent.spec");
  spec.bytes_per_page();  // names a field that is out of range
  const Device device = to_device(from.device, "lent.device");
  const auto layers = entries(from.layers, static_cast<size_t>(spec.layers), "lent.layers");
  std::vector<KvLayerView> views;
  views.reserve(layers.size());
  for (int32_t i = 0; i < spec.layers; ++i) {
    views.push_back(lent_layer(layers[static_cast<size_t>(i)], spec, device, i));
    check(views.back().slots == views.front().slots,
          "layers[{}].k has {} slots, layers[0].k has {}", i, views.back().slots,
          views.front().slots);
  }
  return std::make_shared<LentPool>(spec, device, std::move(views),
                                    lent_slot_map(from, spec, device), reserves_page_zero);
}

}  // namespace fovea::c
