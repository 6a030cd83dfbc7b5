// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_matmul.h"

#include <cstdint>

#include "core/check.h"
#include "gpu/cublaslt_library.h"
#include "gpu/gpu.h"

namespace fovea::bench {
namespace {

using namespace gpu::cublaslt;

// cudaDataType
constexpr int kTypeF32 = 0, kTypeBf16 = 14, kTypeF8e4m3 = 28;
constexpr size_t kWorkspace = size_t{32} << 20;

}  // namespace

// Descriptors live as long as the process; there is one per dtype.
struct SquareMatmul::Plan {
  Handle handle = nullptr;
  Descriptor desc = nullptr;
  Descriptor in = nullptr, out = nullptr;
  Heuristic chosen{};
  gpu::DeviceBuffer workspace{kWorkspace};
};

SquareMatmul::SquareMatmul(DType dtype, int64_t size)
    : plan_(std::make_unique<Plan>()), size_(size) {
  const bool fp8 = dtype == DType::f8e4m3;
  const auto rows = static_cast<uint64_t>(size);
  check_status(library().create(&plan_->handle), "cublasLtCreate");
  check_status(library().matmul_create(&plan_->desc, kComputeF32, kTypeF32),
               "cublasLtMatmulDescCreate");
  const int8_t fast = 1;
  check_status(library().matmul_set(plan_->desc, kTransposeA, &kTransposed, sizeof(kTransposed)),
               "cublasLtMatmulDescSetAttribute");
  if (fp8)
    check_status(library().matmul_set(plan_->desc, kFastAccumulation, &fast, sizeof(fast)),
                 "cublasLtMatmulDescSetAttribute");
  check_status(library().layout_create(&plan_->in, fp8 ? kTypeF8e4m3 : kTypeBf16, rows, rows, size),
               "cublasLtMatrixLayoutCreate");
  check_status(library().layout_create(&plan_->out, kTypeBf16, rows, rows, size),
               "cublasLtMatrixLayoutCreate");
  Descriptor preference = nullptr;
  check_status(library().preference_create(&preference), "cublasLtMatmulPreferenceCreate");
  check_status(
      library().preference_set(preference, kWorkspaceBytes, &kWorkspace, sizeof(kWorkspace)),
      "cublasLtMatmulPreferenceSetAttribute");
  int found = 0;
  check_status(library().heuristic(plan_->handle, plan_->desc, plan_->in, plan_->in, plan_->out,
                                   plan_->out, preference, 1, &plan_->chosen, &found),
               "cublasLtMatmulAlgoGetHeuristic");
  if (found == 0)
    fail(ErrorCode::unsupported, "cuBLASLt has no algorithm for {}", dtype_name(dtype));
}

SquareMatmul::~SquareMatmul() {
  if (plan_ && plan_->handle) library().destroy(plan_->handle);
}

void SquareMatmul::run(const void* a, const void* b, void* c, Stream stream) const {
  const float one = 1;
  const float zero = 0;
  check_status(library().matmul(plan_->handle, plan_->desc, &one, a, plan_->in, b, plan_->in, &zero,
                                c, plan_->out, c, plan_->out, &plan_->chosen.algorithm,
                                plan_->workspace.data(), plan_->workspace.bytes(), stream),
               "cublasLtMatmul");
}

}  // namespace fovea::bench
