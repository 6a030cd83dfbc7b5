// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_matmul.h"

#include <dlfcn.h>

#include <cstdint>

#include "core/check.h"
#include "gpu/gpu.h"

namespace fovea::bench {
namespace {

// cuBLASLt's binary interface, as documented for CUDA 12 and later.
using Handle = struct LtHandle*;
using MatmulDesc = struct LtMatmulDesc*;
using Layout = struct LtLayout*;
using Preference = struct LtPreference*;
using Status = int;
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status status;
  float waves;
  int reserved[4];
};
constexpr int kComputeF32 = 68, kTypeF32 = 0, kTypeBf16 = 14, kTypeF8e4m3 = 28;
constexpr int kTransposeA = 3, kFastAccumulation = 25, kPreferWorkspaceBytes = 1;
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

#define FOVEA_CUBLASLT_FUNCTIONS(X)                                                           \
  X(create, "cublasLtCreate", (Handle*))                                                      \
  X(destroy, "cublasLtDestroy", (Handle))                                                     \
  X(desc_create, "cublasLtMatmulDescCreate", (MatmulDesc*, int, int))                         \
  X(desc_set, "cublasLtMatmulDescSetAttribute", (MatmulDesc, int, const void*, size_t))       \
  X(layout_create, "cublasLtMatrixLayoutCreate", (Layout*, int, uint64_t, uint64_t, int64_t)) \
  X(preference_create, "cublasLtMatmulPreferenceCreate", (Preference*))                       \
  X(preference_set, "cublasLtMatmulPreferenceSetAttribute",                                   \
    (Preference, int, const void*, size_t))                                                   \
  X(heuristic, "cublasLtMatmulAlgoGetHeuristic",                                              \
    (Handle, MatmulDesc, Layout, Layout, Layout, Layout, Preference, int, Heuristic*, int*))  \
  X(matmul, "cublasLtMatmul",                                                                 \
    (Handle, MatmulDesc, const void*, const void*, Layout, const void*, Layout, const void*,  \
     const void*, Layout, void*, Layout, const Algorithm*, void*, size_t, Stream))

struct CublasLt {
#define FOVEA_DECLARE(member, name, parameters) Status(*member) parameters = nullptr;
  FOVEA_CUBLASLT_FUNCTIONS(FOVEA_DECLARE)
#undef FOVEA_DECLARE
  std::string problem;
};

CublasLt load() {
  CublasLt lt;
  void* library = nullptr;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so",
                           "/usr/local/cuda/lib64/libcublasLt.so"}) {
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library) break;
  }
  if (!library) {
    lt.problem = "no cuBLASLt: neither libcublasLt.so.13 nor libcublasLt.so.12 was found";
    return lt;
  }
#define FOVEA_FIND(member, name, parameters)                                \
  lt.member = reinterpret_cast<Status(*) parameters>(dlsym(library, name)); \
  if (!lt.member) lt.problem = "this cuBLASLt has no " name;
  FOVEA_CUBLASLT_FUNCTIONS(FOVEA_FIND)
#undef FOVEA_FIND
  return lt;
}

const CublasLt& lt() {
  static const CublasLt loaded = load();
  return loaded;
}

void check(Status status, const char* call) {
  if (status != 0) fail(ErrorCode::unsupported, "{} returned status {}", call, status);
}

}  // namespace

std::string why_no_matmul() { return lt().problem; }

// Descriptors live as long as the process: there is one of each dtype.
struct SquareMatmul::Plan {
  Handle handle = nullptr;
  MatmulDesc desc = nullptr;
  Layout in = nullptr, out = nullptr;
  Heuristic chosen{};
  gpu::DeviceBuffer workspace{kWorkspaceBytes};
};

SquareMatmul::SquareMatmul(DType dtype, int64_t size)
    : plan_(std::make_unique<Plan>()), size_(size) {
  if (!why_no_matmul().empty()) fail(ErrorCode::unsupported, "{}", why_no_matmul());
  const bool fp8 = dtype == DType::f8e4m3;
  const auto rows = static_cast<uint64_t>(size);
  check(lt().create(&plan_->handle), "cublasLtCreate");
  check(lt().desc_create(&plan_->desc, kComputeF32, kTypeF32), "cublasLtMatmulDescCreate");
  const int transpose = 1;
  const int8_t fast = 1;
  check(lt().desc_set(plan_->desc, kTransposeA, &transpose, sizeof(transpose)), "TRANSA");
  if (fp8) check(lt().desc_set(plan_->desc, kFastAccumulation, &fast, sizeof(fast)), "FAST_ACCUM");
  check(lt().layout_create(&plan_->in, fp8 ? kTypeF8e4m3 : kTypeBf16, rows, rows, size),
        "cublasLtMatrixLayoutCreate");
  check(lt().layout_create(&plan_->out, kTypeBf16, rows, rows, size), "cublasLtMatrixLayoutCreate");
  Preference preference = nullptr;
  check(lt().preference_create(&preference), "cublasLtMatmulPreferenceCreate");
  check(lt().preference_set(preference, kPreferWorkspaceBytes, &kWorkspaceBytes,
                            sizeof(kWorkspaceBytes)),
        "MAX_WORKSPACE_BYTES");
  int found = 0;
  check(lt().heuristic(plan_->handle, plan_->desc, plan_->in, plan_->in, plan_->out, plan_->out,
                       preference, 1, &plan_->chosen, &found),
        "cublasLtMatmulAlgoGetHeuristic");
  if (found == 0)
    fail(ErrorCode::unsupported, "cuBLASLt has no algorithm for {}", dtype_name(dtype));
}

SquareMatmul::~SquareMatmul() {
  if (plan_ && plan_->handle) lt().destroy(plan_->handle);
}

void SquareMatmul::run(const void* a, const void* b, void* c, Stream stream) const {
  const float one = 1;
  const float zero = 0;
  check(lt().matmul(plan_->handle, plan_->desc, &one, a, plan_->in, b, plan_->in, &zero, c,
                    plan_->out, c, plan_->out, &plan_->chosen.algorithm, plan_->workspace.data(),
                    plan_->workspace.bytes(), stream),
        "cublasLtMatmul");
}

}  // namespace fovea::bench
