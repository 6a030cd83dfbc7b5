// SPDX-License-Identifier: Apache-2.0
#include "attention/workspace.h"

#include "core/check.h"
#include "core/memory_error.h"

namespace fovea {

WorkspaceMemory::WorkspaceMemory(Device device, size_t bytes) {
  if (device.kind == DeviceKind::cpu) {
    cpu_.reset(
        static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kWorkspaceAlignment})));
    bytes_ = {cpu_.get(), bytes};
    return;
  }
  context_ = std::make_unique<gpu::Context>(device.index);
  gpu_ = gpu::DeviceBuffer(bytes);
  bytes_ = {gpu_.data<std::byte>(), bytes};
}

WorkspaceMemory::~WorkspaceMemory() {
  if (context_ == nullptr) return;
  context_->bind_to_free();
  gpu_ = {};
}

std::span<std::byte> WorkspaceMemory::given_or_own(std::span<std::byte> given, size_t needed,
                                                   Device device, std::string_view backend) {
  if (given.empty() && needed > 0) {
    name_memory([&] { *this = WorkspaceMemory(device, needed); },
                "the workspace of backend '{}' of {} bytes", backend, needed);
    return bytes_;
  }
  check_workspace(given, needed, backend);
  return given;
}

void check_workspace(std::span<std::byte> workspace, size_t needed, std::string_view backend) {
  if (workspace.size() < needed) {
    fail(ErrorCode::workspace_too_small, "workspace has {} bytes, backend '{}' needs {}",
         workspace.size(), backend, needed);
  }
  check_argument(workspace.data() != nullptr || workspace.empty(), "workspace is null, of {} bytes",
                 workspace.size());
  check_argument(reinterpret_cast<uintptr_t>(workspace.data()) % kWorkspaceAlignment == 0,
                 "workspace is at {}, must be aligned to {} bytes",
                 static_cast<const void*>(workspace.data()), kWorkspaceAlignment);
}

}  // namespace fovea
