// SPDX-License-Identifier: Apache-2.0
#include "attention/backends/entry.h"

#include "core/check.h"
#include "gpu/gpu.h"

namespace fovea {

void refuse(std::string_view name, std::span<const Reason> reasons) {
  if (reasons.empty()) return;
  fail(ErrorCode::unsupported, "backend '{}' does not serve this: {}: {}", name,
       reject_code_name(reasons.front().code), reasons.front().text);
}

BackendRequest request_of(const BackendContext& context) {
  BackendRequest request;
  request.spec = context.spec;
  if (context.kv != nullptr) request.cache = context.kv->spec();
  request.device = context.device.kind == DeviceKind::cpu
                       ? cpu_device()
                       : gpu::Context(context.device.index).info();
  return request;
}

}  // namespace fovea
