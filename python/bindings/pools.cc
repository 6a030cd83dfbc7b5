// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/pools.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/unique_ptr.h>

#include "python/bindings/devices.h"
#include "python/bindings/layer_array.h"
#include "python/bindings/module.h"
#include "python/bindings/values.h"

namespace fovea::python {
namespace {

using PoolHandle = nb::pointer_and_handle<KvPool>;
using WindowHandle = nb::pointer_and_handle<WindowKvPool>;
using StatesHandle = nb::pointer_and_handle<StatePool>;

nb::tuple arrays_of_states(const StatePool& pool, int32_t index, nb::handle owner) {
  const StateCacheSpec& spec = pool.spec();
  const StateLayerView view = pool.layer(index);
  const int64_t taps = spec.conv_width > 0 ? spec.conv_width - 1 : 0;
  LayerArray conv = dense_array(owner, view.conv, DType::f32, {view.slots, spec.conv_dim, taps});
  LayerArray state =
      dense_array(owner, view.state, spec.dtype, {view.slots, spec.heads, spec.rows, spec.columns});
  conv.strides[0] = view.conv_slot_stride;
  state.strides[0] = view.state_slot_stride;
  conv.device = state.device = dl_device(pool.device());
  return nb::make_tuple(conv, state);
}

void bind_kv_pool(nb::module_& module) {
  nb::class_<KvPool>(module, "KvPool",
                     "Keys and values of all layers of a group. KvPool(spec, pages, device) "
                     "allocates zeroed memory; page 0 is reserved for padding. lend() makes a pool "
                     "over arrays of the caller.")
      .def(nb::new_([](nb::handle spec, nb::handle pages, nb::handle device) {
             return make_kv_pool(value_from<KvCacheSpec>(spec, "spec"),
                                 integer_from<int64_t>(pages, "pages"),
                                 device_from(device, "device"));
           }),
           nb::arg("spec"), nb::arg("pages"), nb::arg("device") = "cpu")
      .def_static(
          "lend",
          [](nb::handle spec, nb::handle layers, nb::handle device, nb::handle keep,
             nb::handle reserves_page_zero) -> std::unique_ptr<KvPool> {
            return std::make_unique<LentPool>(
                value_from<KvCacheSpec>(spec, "spec"), layers,
                LendOptions{device, bool_from(keep, "keep"),
                            bool_from(reserves_page_zero, "reserves_page_zero")});
          },
          nb::arg("spec"), nb::arg("layers"), nb::arg("device") = nb::none(), nb::kw_only(),
          nb::arg("keep") = true, nb::arg("reserves_page_zero") = false,
          nb::sig("def lend(spec: KvCacheSpec, layers: collections.abc.Sequence, device: Device | "
                  "str | None = None, *, keep: bool = True, reserves_page_zero: bool = False) -> "
                  "KvPool"),
          "Makes a pool over arrays that the caller owns. The pool keeps references to them unless "
          "keep is False: then the caller keeps their memory. Each "
          "layer is (k, v), (k, v, k_scale, v_scale), for mla layouts (rows,) or (rows, scale). "
          "nhd: k and v are [pages, page_size, kv_heads, dim]; hnd: [pages, kv_heads, page_size, "
          "dim]; mla: rows are [pages, page_size, head_dim]; mla_fp8_rows: uint8 [pages, "
          "page_size, 656]. Scales are f32 and dense: per_tensor [1], per_head [kv_heads], "
          "per_token_head [pages, page_size, kv_heads]. reserves_page_zero: only padding uses page "
          "0, as in pools of the library; else padding has lengths of 0 and writes to -1.")
      .def(
          "layer",
          [](const PoolHandle& self, nb::handle index) {
            return arrays_of_layer(*self.p, integer_from<int32_t>(index, "index"), self.h);
          },
          nb::arg("index"), nb::sig("def layer(self, index: int) -> tuple[LayerArray, ...]"),
          "Returns the arrays of a layer in the form that lend() takes, over the pool's memory.")
      .def_prop_ro("spec", [](const KvPool& self) { return self.spec(); })
      .def_prop_ro("pages", &KvPool::pages)
      .def_prop_ro("reserves_page_zero", &KvPool::reserves_page_zero)
      .def_prop_ro("device", &KvPool::device)
      .def_prop_ro("nbytes", [](const KvPool& self) {
        return static_cast<size_t>(self.pages()) * self.spec().bytes_per_page();
      });
}

void bind_window_pool(nb::module_& module) {
  nb::class_<WindowKvPool, KvPool>(module, "WindowKvPool",
                                   "A pool of window layers whose slots are translated from those "
                                   "of a full pool of `full_slots` slots.")
      .def(
          nb::new_([](nb::handle spec, nb::handle pages, nb::handle full_slots, nb::handle device) {
            return make_window_kv_pool(
                value_from<KvCacheSpec>(spec, "spec"), integer_from<int64_t>(pages, "pages"),
                integer_from<int64_t>(full_slots, "full_slots"), device_from(device, "device"));
          }),
          nb::arg("spec"), nb::arg("pages"), nb::arg("full_slots"), nb::arg("device") = "cpu")
      .def(
          "map",
          [](WindowKvPool& self, nb::handle slots) {
            return self.map(integers_of<int64_t>(slots, "full_slots"));
          },
          nb::arg("full_slots"),
          "Maps slots. Returns False, and maps nothing, if the pool is full.")
      .def(
          "unmap",
          [](WindowKvPool& self, nb::handle slots) {
            self.unmap(std::span<const int64_t>(integers_of<int64_t>(slots, "full_slots")));
          },
          nb::arg("full_slots"), "Unmaps slots; those that are not mapped are ignored.")
      .def(
          "unmap_pages",
          [](WindowKvPool& self, nb::handle pages) {
            self.unmap_pages(integers_of<int64_t>(pages, "full_pages"));
          },
          nb::arg("full_pages"))
      .def(
          "publish",
          [](WindowKvPool& self, nb::handle stream) {
            self.publish(stream_from(stream, self.device(), nullptr));
          },
          nb::arg("stream") = nb::none(),
          "Copies changes to the device, for work that is enqueued on the stream afterwards.")
      .def(
          "usable_prefix",
          [](const WindowKvPool& self, nb::handle pages) {
            return usable_window_prefix(self, integers_of<int64_t>(pages, "full_pages"));
          },
          nb::arg("full_pages"),
          "Returns the tokens of a cached prefix, given by its full pages, that a request can "
          "continue from.")
      .def_prop_ro("free_pages", &WindowKvPool::free_pages)
      .def_prop_ro("slot_map", [](const WindowHandle& self) {
        const std::span<const int64_t> map = self.p->slot_map();
        return dense_array(self.h, map.data(), DType::i64, {static_cast<int64_t>(map.size())});
      });
}

void bind_state_pool(nb::module_& module) {
  nb::class_<StatePool>(module, "StatePool",
                        "Recurrent states of linear layers, one slot per request. Slot 0 is the "
                        "dummy.")
      .def(nb::new_([](nb::handle spec, nb::handle slots, nb::handle device) {
             return make_state_pool(value_from<StateCacheSpec>(spec, "spec"),
                                    integer_from<int32_t>(slots, "slots"),
                                    device_from(device, "device"));
           }),
           nb::arg("spec"), nb::arg("slots"), nb::arg("device") = "cpu")
      .def("allocate", &StatePool::allocate, "Returns a zeroed slot; None: the pool is full.")
      .def(
          "release",
          [](StatePool& self, nb::handle slot) {
            self.release(integer_from<int32_t>(slot, "slot"));
          },
          nb::arg("slot"))
      .def(
          "copy",
          [](StatePool& self, nb::handle source, nb::handle target) {
            self.copy(integer_from<int32_t>(source, "source"),
                      integer_from<int32_t>(target, "target"));
          },
          nb::arg("source"), nb::arg("target"), "Copies the states of all layers.")
      .def(
          "publish",
          [](StatePool& self, nb::handle stream) {
            self.publish(stream_from(stream, self.device(), nullptr));
          },
          nb::arg("stream") = nb::none(),
          "On a GPU: enqueues what allocate() and copy() do to the states, for work that is "
          "enqueued "
          "on the stream afterwards.")
      .def(
          "in_use",
          [](const StatePool& self, nb::handle slot) {
            return self.in_use(integer_from<int32_t>(slot, "slot"));
          },
          nb::arg("slot"))
      .def(
          "layer",
          [](const StatesHandle& self, nb::handle index) {
            return arrays_of_states(*self.p, integer_from<int32_t>(index, "index"), self.h);
          },
          nb::arg("index"),
          "Returns conv [slots, conv_dim, conv_width - 1] and state [slots, heads, rows, columns], "
          "f32.")
      .def_prop_ro("spec", [](const StatePool& self) { return self.spec(); })
      .def_prop_ro("slots", &StatePool::slots)
      .def_prop_ro("device", &StatePool::device)
      .def_prop_ro("free_slots", &StatePool::free_slots);
}

}  // namespace

void bind_pools(nb::module_& module) {
  bind_kv_pool(module);
  bind_window_pool(module);
  bind_state_pool(module);
}

}  // namespace fovea::python
