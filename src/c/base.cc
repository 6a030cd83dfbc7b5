// SPDX-License-Identifier: Apache-2.0
// Versions, devices, tensors and threads.
#include <algorithm>

#include "c/handles.h"
#include "c/specs.h"
#include "c/tensors.h"
#include "fovea/gpu.h"
#include "fovea/kernel_pack.h"
#include "fovea/version.h"

namespace fovea::c {
namespace {

template <size_t n>
void copy_text(const std::string& from, char (&to)[n]) {
  const size_t length = std::min(from.size(), n - 1);
  std::copy_n(from.begin(), length, to);
  std::fill(to + length, to + n, '\0');
}

fovea_device_info from_device_info(const DeviceInfo& info) {
  fovea_device_info to{.struct_size = sizeof(fovea_device_info)};
  to.sm = info.sm;
  to.device = from_device(info.device());
  to.cores = info.cores;
  to.memory_bytes = info.memory_bytes;
  copy_text(info.name, to.name);
  copy_text(info.isa, to.isa);
  return to;
}

std::string kernel_source(int32_t source) {
  const KernelSources sources = kernel_sources();
  switch (source) {
    case FOVEA_KERNEL_PACK:
      return sources.pack_path;
    case FOVEA_KERNEL_WHY_NO_PACK:
      return sources.why_no_pack;
    case FOVEA_KERNEL_CACHE:
      return sources.cache_path;
    case FOVEA_KERNEL_COMPILER:
      return sources.compiler;
    case FOVEA_KERNEL_WHY_NO_COMPILER:
      return sources.why_no_compiler;
    default:
      refuse("source is {}, must be in [{}, {}]", source, int{FOVEA_KERNEL_PACK},
             int{FOVEA_KERNEL_WHY_NO_COMPILER});
  }
}

}  // namespace
}  // namespace fovea::c

using namespace fovea::c;  // NOLINT: the functions below are those of the C header

uint32_t fovea_abi_version() { return FOVEA_ABI_VERSION; }

const char* fovea_version() { return FOVEA_VERSION; }

uint64_t fovea_features() {
  return FOVEA_FEATURE_ATTENTION | FOVEA_FEATURE_LINEAR | FOVEA_FEATURE_MERGE |
         FOVEA_FEATURE_COMPOSE | FOVEA_FEATURE_PREFIX_CACHE | FOVEA_FEATURE_PASS_ADDRESSES |
         FOVEA_FEATURE_ENGINE;
}

fovea_status fovea_parse_dtype(const char* name, fovea_dtype* dtype) {
  return guarded([&] {
    const auto parsed = fovea::parse_dtype(need_text(name, "name"));
    check(parsed.has_value(), "name is '{}', which is no dtype", name);
    set(dtype, static_cast<fovea_dtype>(*parsed), "dtype");
  });
}

fovea_status fovea_device_info_init(fovea_device_info* info, size_t struct_size) {
  return init_struct(info, struct_size, {.cores = 1}, "info");
}

fovea_status fovea_find_device(const char* name, fovea_device_info* info) {
  return guarded([&] {
    struct_size_of(info, "info");
    write_struct(info, from_device_info(fovea::find_device(need_text(name, "name"))), "info");
  });
}

fovea_status fovea_gpu_count(int32_t* count) {
  return guarded([&] {
    check_pointer(count, "count");
    set(count, static_cast<int32_t>(fovea::gpu_devices().size()), "count");
  });
}

fovea_status fovea_why_no_gpu(char* text, size_t* bytes) {
  return guarded([&] { give_text(fovea::why_no_gpu(), text, bytes); });
}

fovea_status fovea_kernel_source(int32_t source, char* text, size_t* bytes) {
  return guarded([&] { give_text(kernel_source(source), text, bytes); });
}

fovea_status fovea_tensor_init(fovea_tensor* tensor, void* data, fovea_dtype dtype,
                               fovea_device device, const int64_t* shape, int32_t ndim) {
  return guarded([&] {
    check_pointer(tensor, "tensor");
    check_alignment(tensor, alignof(fovea_tensor), "tensor");
    check(ndim >= 1 && ndim <= FOVEA_TENSOR_DIMENSIONS, "ndim is {}, must be in [1, {}]", ndim,
          FOVEA_TENSOR_DIMENSIONS);
    const auto extents = entries(shape, static_cast<size_t>(ndim), "shape");
    const fovea::DType type = to_enum(dtype, fovea::DType::u8, "dtype");
    *tensor = {.view = {.data = data,
                        .device = dl_device(to_device(device)),
                        .ndim = ndim,
                        .dtype = dl_type(type)}};
    tensor->view.shape = tensor->shape;
    tensor->view.strides = tensor->strides;
    std::copy(extents.begin(), extents.end(), tensor->shape);
    int64_t stride = 1;
    for (int32_t i = ndim - 1; i >= 0; --i) {
      tensor->strides[i] = stride;
      const int64_t extent = std::max<int64_t>(extents[i], 1);
      check(stride <= INT64_MAX / extent, "shape[{}] is {}: too many elements", i, extent);
      stride *= extent;
    }
  });
}

fovea_status fovea_tensor_of_managed(const DLManagedTensorVersioned* managed, int32_t writes,
                                     const char* name, const DLTensor** tensor) {
  return guarded([&] {
    const std::string_view what = need_text(name, "name");
    check_pointer(tensor, "tensor");
    check_pointer(managed, what);
    check_alignment(managed, alignof(DLManagedTensorVersioned), what);
    check(managed->version.major == 1, "{} has DLPack version {}.{}, must be 1.x", what,
          managed->version.major, managed->version.minor);
    const bool read_only = (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
    check(!to_flag(writes, "writes") || !read_only, "{} is read-only, but Fovea writes it", what);
    set(tensor, &managed->dl_tensor, "tensor");
  });
}

fovea_status fovea_thread_pool_create(int32_t threads, fovea_thread_pool** pool) {
  return guarded([&] {
    clear_handle(pool, "pool");
    auto made = std::make_unique<fovea_thread_pool>();
    made->object = std::make_shared<fovea::ThreadPool>(threads);
    give_handle(std::move(made), pool);
  });
}

fovea_status fovea_thread_pool_size(const fovea_thread_pool* pool, int32_t* size) {
  return guarded([&] { set(size, need(pool, "pool").object->size(), "size"); });
}

fovea_status fovea_thread_pool_destroy(fovea_thread_pool* pool) {
  return destroy_handle(pool, "pool");
}
