// SPDX-License-Identifier: Apache-2.0
// Rows without code: they keep the names of the field resolvable and say why each is not here.
#include <limits>
#include <optional>

#include "attention/backends/backends.h"
#include "attention/capability.h"
#include "core/check.h"
#include "gpu/architectures.h"

namespace fovea {
namespace {

// `device` is a reason of its own where others are wrong for the backend anyway.
BackendEntry unavailable(BackendEntry entry, std::optional<Capability> device = {}) {
  entry.reject = [why = entry.why_not_built, device](const BackendRequest& request) {
    std::vector<Reason> reasons;
    if (device) {
      if (auto reason = device_reason(*device, request.device))
        reasons.push_back(std::move(*reason));
    }
    reasons.push_back({RejectCode::not_built, why});
    return reasons;
  };
  entry.workspace_bytes = [name = entry.name](const BackendRequest&) -> size_t {
    fail(ErrorCode::unsupported, "backend '{}' is not in this build", name);
  };
  entry.create = [name = entry.name](const BackendContext&) -> std::unique_ptr<AttentionBackend> {
    fail(ErrorCode::unsupported, "backend '{}' is not in this build", name);
  };
  return entry;
}

struct GpuRow {
  const char* name;
  const char* role;
  std::vector<std::string> aliases;
  int min_sm;
  int max_sm;
};

BackendEntry gpu_row(GpuRow row) {
  Capability can;
  can.device = DeviceKind::cuda;
  can.min_sm = row.min_sm;
  can.max_sm = row.max_sm;
  return unavailable({.name = row.name,
                      .role = row.role,
                      .aliases = std::move(row.aliases),
                      .why_not_built = "this build has no such backend yet"},
                     can);
}

BackendEntry unported_row(const char* name, std::vector<std::string> aliases, const char* reason) {
  return unavailable(
      {.name = name, .role = reason, .aliases = std::move(aliases), .why_not_built = reason});
}

}  // namespace

std::vector<BackendEntry> missing_gpu_backends() {
  constexpr int kAny = std::numeric_limits<int>::max();
  std::vector<GpuRow> rows = {
      {"sparse_mla",
       "token-sparse MLA with an indexer",
       {"nsa", "dsa", "flashmla_sparse", "flashinfer_mla_sparse"},
       gpu::kHopper,
       gpu::kHopper},
      {"double_sparsity", "attention over heavy channels and tokens", {}, gpu::kAmpere, kAny},
      {"cudnn", "the GPU vendor's kernels", {}, gpu::kAmpere, kAny},
  };
  std::vector<BackendEntry> entries;
  for (GpuRow& row : rows) entries.push_back(gpu_row(std::move(row)));
  return entries;
}

std::vector<BackendEntry> unported_backends() {
  return {
      unported_row("hybrid", {"hybrid_attn", "hybrid_linear_attn"},
                   "a composition, not a backend: choose backends per phase or per layer"),
      unported_row("aiter", {"rocm_aiter_fa", "rocm_attn", "rocm_aiter_mla"},
                   "AMD GPUs are not supported"),
      unported_row("wave", {}, "AMD GPUs are not supported"),
      unported_row("ascend", {}, "Ascend processors are not supported"),
      unported_row("intel_xpu", {"xpu"}, "Intel GPUs are not supported"),
      unported_row("dual_chunk", {"dual_chunk_flash_attn"},
                   "a rule of scores, not a backend: give the layers dual_chunk; on a CPU only"),
      unported_row("tree_attn", {}, "a mask, not a backend: give the layers mask tree"),
      unported_row("turboquant", {}, "rotated low-bit caches are not supported"),
  };
}

}  // namespace fovea
