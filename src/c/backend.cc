// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "c/handles.h"
#include "c/pass.h"
#include "c/specs.h"

namespace fovea::c {
namespace {

BackendContext context_of(const fovea_selection& selection, fovea_kv_pool* kv,
                          fovea_state_pool* states, fovea_thread_pool* threads) {
  check(selection.object.chosen != nullptr, "selection has no backend: {}", selection.refusal);
  BackendContext context;
  context.spec = selection.request.spec;
  context.device = selection.request.device.device();
  if (kv != nullptr) context.kv = need(kv, "kv").object.get();
  if (states != nullptr) context.state = need(states, "states").object.get();
  if (threads != nullptr) context.threads = need(threads, "threads").object.get();
  return context;
}

void plan(fovea_backend& backend, const fovea_batch* batch, void* stream) {
  backend.planned_tokens = 0;
  const BatchView view = to_batch(batch, backend.object->device(), backend.limits);
  backend.object->plan(view, static_cast<Stream>(stream));
  if (view.mode != ForwardMode::idle) backend.planned_tokens = view.tokens;
}

LayerTensors layer_of(const fovea_backend& backend, const fovea_layer_tensors* layer) {
  const fovea_layer_tensors from = read_struct(layer, kDefaultLayer, "layer");
  return to_layer(from,
                  {backend.spec(from.layer), backend.object->device(), backend.planned_tokens});
}

}  // namespace
}  // namespace fovea::c

const fovea::AttentionSpec& fovea_backend::spec(int32_t layer) const {
  if (!by_layer) return specs.front();
  fovea::c::check(layer >= 0 && static_cast<size_t>(layer) < specs.size(),
                  "layer is {}, the composition has {}", layer, specs.size());
  return specs[static_cast<size_t>(layer)];
}

using namespace fovea::c;  // NOLINT: the functions below are those of the C header

fovea_status fovea_backend_create(const fovea_selection* selection, fovea_kv_pool* kv,
                                  fovea_state_pool* states, fovea_thread_pool* threads,
                                  fovea_backend** backend) {
  return guarded([&] {
    clear_handle(backend, "backend");
    const fovea_selection& given = need(selection, "selection");
    const fovea::BackendContext context = context_of(given, kv, states, threads);
    auto made = std::make_unique<fovea_backend>();
    if (kv != nullptr) made->owners.push_back(kv->object);
    if (states != nullptr) made->owners.push_back(states->object);
    if (threads != nullptr) made->owners.push_back(threads->object);
    made->specs = {context.spec};
    made->object = given.object.chosen->create(context);
    give_handle(std::move(made), backend);
  });
}

fovea_status fovea_backend_destroy(fovea_backend* backend) {
  return destroy_handle(backend, "backend");
}

fovea_status fovea_backend_name(const fovea_backend* backend, char* text, size_t* bytes) {
  return guarded([&] { give_text(need(backend, "backend").object->name(), text, bytes); });
}

fovea_status fovea_backend_device(const fovea_backend* backend, fovea_device* device) {
  return guarded(
      [&] { set(device, from_device(need(backend, "backend").object->device()), "device"); });
}

fovea_status fovea_backend_workspace_bytes(const fovea_backend* backend,
                                           const fovea_batch_limits* limits, size_t* bytes) {
  return guarded([&] {
    const fovea::AttentionBackend& given = *need(backend, "backend").object;
    set(bytes, given.workspace_bytes(to_limits(limits)), "bytes");
  });
}

fovea_status fovea_backend_reserve(fovea_backend* backend, const fovea_batch_limits* limits,
                                   void* workspace, size_t bytes) {
  return guarded([&] {
    fovea_backend& given = need(backend, "backend");
    check(workspace != nullptr || bytes == 0, "workspace is null, of {} bytes", bytes);
    check(workspace == nullptr || bytes > 0, "bytes is 0, but a workspace is given");
    const fovea::BatchLimits wanted = to_limits(limits);
    given.planned_tokens = 0;
    given.object->reserve(wanted, {static_cast<std::byte*>(workspace), bytes});
    given.limits = wanted;
  });
}

fovea_status fovea_backend_plan(fovea_backend* backend, const fovea_batch* batch, void* stream) {
  return guarded([&] { plan(need(backend, "backend"), batch, stream); });
}

fovea_status fovea_backend_forward(fovea_backend* backend, const fovea_layer_tensors* layer,
                                   void* stream) {
  return guarded([&] {
    fovea_backend& given = need(backend, "backend");
    given.object->forward(layer_of(given, layer), static_cast<fovea::Stream>(stream));
  });
}

fovea_status fovea_pass_addresses_create(fovea_pass_addresses** addresses) {
  return guarded([&] {
    clear_handle(addresses, "addresses");
    give_handle(std::make_unique<fovea_pass_addresses>(), addresses);
  });
}

fovea_status fovea_pass_addresses_destroy(fovea_pass_addresses* addresses) {
  return destroy_handle(addresses, "addresses");
}

fovea_status fovea_pass_addresses_add_batch(fovea_pass_addresses* addresses,
                                            const fovea_backend* backend,
                                            const fovea_batch* batch) {
  return guarded([&] {
    const fovea_backend& given = need(backend, "backend");
    need(addresses, "addresses").object.add(to_batch(batch, given.object->device(), given.limits));
  });
}

fovea_status fovea_pass_addresses_add_layer(fovea_pass_addresses* addresses,
                                            const fovea_backend* backend,
                                            const fovea_layer_tensors* layer) {
  return guarded(
      [&] { need(addresses, "addresses").object.add(layer_of(need(backend, "backend"), layer)); });
}

fovea_status fovea_pass_addresses_add_pool(fovea_pass_addresses* addresses,
                                           const fovea_kv_pool* pool) {
  return guarded([&] { need(addresses, "addresses").object.add(*need(pool, "pool").object); });
}

fovea_status fovea_pass_addresses_add(fovea_pass_addresses* addresses, const char* name,
                                      const void* address) {
  return guarded([&] {
    need(addresses, "addresses").object.add(std::string(need_text(name, "name")), address);
  });
}

fovea_status fovea_pass_addresses_check(const fovea_pass_addresses* addresses,
                                        const fovea_pass_addresses* now) {
  return guarded([&] { need(addresses, "addresses").object.check(need(now, "now").object); });
}
