// SPDX-License-Identifier: Apache-2.0
#include "attention/entry.h"

#include <span>
#include <string_view>
#include <utility>

#include "attention/validate/spec.h"
#include "core/check.h"
#include "core/check_device.h"
#include "core/memory_error.h"
#include "gpu/gpu.h"

namespace fovea {

namespace {

void refuse(std::string_view name, std::span<const Reason> reasons) {
  if (reasons.empty()) return;
  fail(ErrorCode::unsupported, "backend '{}' does not serve this: {}: {}", name,
       reject_code_name(reasons.front().code), reasons.front().text);
}

// Returns the request that a context makes.
BackendRequest request_of(const BackendContext& context) {
  BackendRequest request;
  request.spec = context.spec;
  if (context.kv != nullptr) request.cache = context.kv->spec();
  request.device = context.device.kind == DeviceKind::cpu
                       ? cpu_device()
                       : gpu::Context(context.device.index).info();
  return request;
}

}  // namespace

BackendEntry guarded(BackendEntry entry) {
  entry.create = [name = entry.name, reject = entry.reject,
                  create = std::move(entry.create)](const BackendContext& context) {
    const auto checked = [&] {
      check_device(context.device, "device");
      validate_spec(context.spec);
      refuse(name, reject(request_of(context)));
      return create(context);
    };
    return name_memory(checked, "backend '{}'", name);
  };
  entry.reject = [reject = std::move(entry.reject)](const BackendRequest& request) {
    validate_request(request);
    return reject(request);
  };
  entry.workspace_bytes = [name = entry.name, reject = entry.reject,
                           bytes =
                               std::move(entry.workspace_bytes)](const BackendRequest& request) {
    refuse(name, reject(request));
    return bytes(request);
  };
  return entry;
}

}  // namespace fovea
