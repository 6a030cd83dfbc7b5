// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/devices.h"
#include "python/bindings/layer_array.h"
#include "python/bindings/pools.h"
#include "python/bindings/values.h"

namespace fovea::python {
namespace {

constexpr int64_t kMlaRowBytes = 656;

bool is_mla(const KvCacheSpec& spec) { return spec.layout != KvLayout::mha; }

// The axes of tokens and heads of an array [pages, .., .., dim].
int32_t token_axis(const KvCacheSpec& spec) { return spec.order == KvOrder::nhd ? 1 : 2; }
int32_t head_axis(const KvCacheSpec& spec) { return spec.order == KvOrder::nhd ? 2 : 1; }

// Returns the stride of an axis. That of an axis of one element is free, so it gets the dense one.
int64_t stride_of(const Array& array, int32_t axis) {
  if (array.extent(axis) > 1) return array.stride(axis);
  int64_t dense = 1;
  for (int32_t inner = axis + 1; inner < array.dimensions(); ++inner) dense *= array.extent(inner);
  return dense;
}

struct PageStrides {
  int64_t page, token, head;
};

PageStrides read_rows(const Array& array, const KvCacheSpec& spec, int64_t pages, int64_t dim) {
  const bool nhd = spec.order == KvOrder::nhd;
  const std::string shape =
      nhd ? fmt::format("[{}, {}, {}, {}]", pages, spec.page_size, spec.kv_heads, dim)
          : fmt::format("[{}, {}, {}, {}]", pages, spec.kv_heads, spec.page_size, dim);
  array.check_dimensions(4, shape.c_str());
  array.check_extent(0, pages, shape.c_str());
  array.check_extent(token_axis(spec), spec.page_size, shape.c_str());
  array.check_extent(head_axis(spec), spec.kv_heads, shape.c_str());
  array.check_extent(3, dim, shape.c_str());
  array.check_dtype(spec.dtype);
  array.check_last_axis();
  return {stride_of(array, 0), stride_of(array, token_axis(spec)),
          stride_of(array, head_axis(spec))};
}

float* read_scale(const Array& array, const KvCacheSpec& spec, int64_t pages) {
  const int64_t heads = spec.kv_heads;
  int64_t elements = 1;
  std::string shape = "[1]";
  if (spec.scale == KvScale::per_head) {
    elements = heads;
    shape = fmt::format("[{}]", heads);
  } else if (spec.scale == KvScale::per_token_head) {
    elements = pages * spec.page_size * heads;
    shape = fmt::format("[{}, {}, {}] or [{}, {}]", pages, spec.page_size, heads,
                        pages * spec.page_size, heads);
  }
  check_argument(array.elements() == elements, "{} has shape {}, must be {}", array.name(),
                 array.shape_text(), shape);
  array.check_dtype(DType::f32);
  array.check_dense();
  return reinterpret_cast<float*>(array.data());
}

nb::handle item(nb::handle tuple, Py_ssize_t index) {
  return PyTuple_Check(tuple.ptr()) ? PyTuple_GetItem(tuple.ptr(), index)
                                    : PyList_GetItem(tuple.ptr(), index);
}

}  // namespace

LentPool::LentPool(const KvCacheSpec& spec, nb::handle layers, const LendOptions& options)
    : spec_(spec), options_(options) {
  check_argument(spec.layers >= 1, "layers is {}, must be positive", spec.layers);
  check_argument(spec.page_size >= 1, "page_size is {}, must be positive", spec.page_size);
  if (is_given(options.device)) {
    device_ = device_from(options.device, "device");
    has_device_ = true;
  }
  const bool sequence = PyTuple_Check(layers.ptr()) || PyList_Check(layers.ptr());
  check_argument(sequence, "layers is {}, must be a list of tuples of arrays", type_text(layers));
  const Py_ssize_t size = PySequence_Size(layers.ptr());
  check_argument(size == spec.layers, "layers has {} entries, the spec has {} layers", size,
                 spec.layers);
  for (Py_ssize_t layer = 0; layer < size; ++layer) {
    try {
      add_layer(item(layers, layer));
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("layers[{}]: {}", layer, error.what()));
    }
  }
}

void LentPool::add_layer(nb::handle arrays) {
  const bool sequence = PyTuple_Check(arrays.ptr()) || PyList_Check(arrays.ptr());
  check_argument(sequence, "the entry is {}, must be a tuple of arrays", type_text(arrays));
  const bool scaled = spec_.scale != KvScale::none;
  const Py_ssize_t wanted = (is_mla(spec_) ? 1 : 2) * (scaled ? 2 : 1);
  const char* const form = is_mla(spec_) ? (scaled ? "(rows, scale)" : "(rows,)")
                                         : (scaled ? "(k, v, k_scale, v_scale)" : "(k, v)");
  check_argument(PySequence_Size(arrays.ptr()) == wanted, "the entry has {} arrays, must be {}",
                 PySequence_Size(arrays.ptr()), form);
  KvLayerView view{.layout = spec_.layout,
                   .scale = spec_.scale,
                   .dtype = spec_.dtype,
                   .page_size = spec_.page_size};
  add_rows(arrays, view);
  if (scaled) {
    Array k_scale(item(arrays, is_mla(spec_) ? 1 : 2), is_mla(spec_) ? "scale" : "k_scale");
    k_scale.check_device(device_);
    k_scale.check_writable();
    view.k_scale = view.v_scale = read_scale(k_scale, spec_, pages_);
    keep(k_scale);
  }
  if (scaled && !is_mla(spec_)) {
    Array v_scale(item(arrays, 3), "v_scale");
    v_scale.check_device(device_);
    v_scale.check_writable();
    view.v_scale = read_scale(v_scale, spec_, pages_);
    keep(v_scale);
  }
  for (Py_ssize_t i = 0; options_.keep && i < wanted; ++i) keeper_.keep(item(arrays, i));
  view.slots = pages_ * spec_.page_size;
  views_.push_back(view);
}

void LentPool::add_rows(nb::handle arrays, KvLayerView& view) {
  Array k(item(arrays, 0), is_mla(spec_) ? "rows" : "k");
  if (!has_device_) device_ = python::device_of(k.device());
  has_device_ = true;
  k.check_device(device_);
  k.check_writable();
  if (pages_ == 0 && k.dimensions() > 0) pages_ = k.extent(0);
  keep(k);
  if (is_mla(spec_)) {
    const bool bytes = spec_.layout == KvLayout::mla_fp8_rows;
    const int64_t width = bytes ? kMlaRowBytes : spec_.head_dim;
    const std::string shape = fmt::format("[{}, {}, {}]", pages_, spec_.page_size, width);
    const bool with_head = k.dimensions() == 4 && k.extent(head_axis(spec_)) == 1;
    if (!with_head) k.check_dimensions(3, shape.c_str());
    const int32_t tokens = with_head ? token_axis(spec_) : 1;
    k.check_extent(0, pages_, shape.c_str());
    k.check_extent(tokens, spec_.page_size, shape.c_str());
    k.check_extent(k.dimensions() - 1, width, shape.c_str());
    if (!bytes || k.dtype() != dl_type(DType::u8)) k.check_dtype(spec_.dtype);
    k.check_last_axis();
    view.k = view.v = k.data();
    view.k_page_stride = view.v_page_stride = stride_of(k, 0);
    view.k_token_stride = view.v_token_stride = stride_of(k, tokens);
    view.k_head_stride = view.v_head_stride = width;
    return;
  }
  Array v(item(arrays, 1), "v");
  v.check_device(device_);
  v.check_writable();
  keep(v);
  const PageStrides k_strides = read_rows(k, spec_, pages_, spec_.head_dim);
  const PageStrides v_strides = read_rows(v, spec_, pages_, spec_.head_dim_v);
  view.k = k.data();
  view.v = v.data();
  view.k_page_stride = k_strides.page;
  view.k_token_stride = k_strides.token;
  view.k_head_stride = k_strides.head;
  view.v_page_stride = v_strides.page;
  view.v_token_stride = v_strides.token;
  view.v_head_stride = v_strides.head;
}

KvLayerView LentPool::layer(int32_t index) const {
  check_argument(index >= 0 && index < spec_.layers, "layer is {}, must be in [0, {})", index,
                 spec_.layers);
  return views_[static_cast<size_t>(index)];
}

nb::tuple arrays_of_layer(const KvPool& pool, int32_t index, nb::handle owner) {
  const KvCacheSpec& spec = pool.spec();
  const KvLayerView view = pool.layer(index);
  const DlDevice device = dl_device(pool.device());
  const auto rows = [&](char* data, int64_t dim, const PageStrides& strides) {
    LayerArray array{nb::borrow(owner), data, dl_type(spec.dtype), device};
    if (is_mla(spec)) {
      array.shape = {pool.pages(), spec.page_size, dim};
      array.strides = {strides.page, strides.token, 1};
    } else if (spec.order == KvOrder::nhd) {
      array.shape = {pool.pages(), spec.page_size, spec.kv_heads, dim};
      array.strides = {strides.page, strides.token, strides.head, 1};
    } else {
      array.shape = {pool.pages(), spec.kv_heads, spec.page_size, dim};
      array.strides = {strides.page, strides.head, strides.token, 1};
    }
    return array;
  };
  const auto scales = [&](float* data) {
    LayerArray array{nb::borrow(owner), data, dl_type(DType::f32), device};
    if (spec.scale == KvScale::per_token_head) {
      array.shape = {pool.pages(), spec.page_size, spec.kv_heads};
      array.strides = {int64_t{spec.page_size} * spec.kv_heads, spec.kv_heads, 1};
    } else {
      array.shape = {spec.scale == KvScale::per_head ? spec.kv_heads : 1};
      array.strides = {1};
    }
    return array;
  };
  const bool bytes = spec.layout == KvLayout::mla_fp8_rows;
  LayerArray k = rows(view.k, bytes ? kMlaRowBytes : spec.head_dim,
                      {view.k_page_stride, view.k_token_stride, view.k_head_stride});
  if (bytes) k.dtype = dl_type(DType::u8);
  nb::list list;
  list.append(k);
  if (!is_mla(spec)) {
    list.append(rows(view.v, spec.head_dim_v,
                     {view.v_page_stride, view.v_token_stride, view.v_head_stride}));
  }
  if (spec.scale != KvScale::none) list.append(scales(view.k_scale));
  if (spec.scale != KvScale::none && !is_mla(spec)) list.append(scales(view.v_scale));
  return nb::tuple(list);
}

}  // namespace fovea::python
