// SPDX-License-Identifier: Apache-2.0
#include "gpu/cublaslt.h"

#include <bit>

#include "core/check.h"
#include "core/rounding.h"
#include "gpu/cublaslt_library.h"

namespace fovea::gpu {
namespace {

using namespace cublaslt;

constexpr int kEpilogueBias = 4;

// cudaDataType
int type_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0;
    case DType::f16:
      return 2;
    case DType::bf16:
      return 14;
    default:
      fail(ErrorCode::unsupported, "matrix products of {} are not supported", dtype_name(dtype));
  }
}

struct Layout {
  // cuBLAS is column-major: `rows` are contiguous.
  Layout(DType dtype, int64_t rows, int64_t columns, int64_t stride) {
    check_status(library().layout_create(&handle, type_of(dtype), static_cast<uint64_t>(rows),
                                         static_cast<uint64_t>(columns), stride),
                 "cublasLtMatrixLayoutCreate");
  }
  ~Layout() { library().layout_destroy(handle); }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  Descriptor handle = nullptr;
};

// Layouts of a product or its key in column-major terms: out^T [n, rows] = weight [n, k] * x^T [k,
// rows].
struct Layouts {
  template <typename Shape>
  explicit Layouts(const Shape& p)
      : weight(p.dtype, p.weight_is_kn ? p.n : p.k, p.weight_is_kn ? p.k : p.n, p.weight_stride),
        x(p.dtype, p.k, p.rows, p.x_stride),
        out(p.out_dtype, p.n, p.rows, p.out_stride) {}
  Layout weight, x, out;
};

struct Preference {
  Preference() {
    check_status(library().preference_create(&handle), "cublasLtMatmulPreferenceCreate");
  }
  ~Preference() { library().preference_destroy(handle); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  Descriptor handle = nullptr;
};

constexpr uint32_t kMaxAligned = 256;  // largest alignment in bytes that cuBLASLt distinguishes

}  // namespace

const std::string& why_no_cublaslt() { return cublaslt::loaded().problem; }

struct MatrixProducts::Plan {
  Descriptor matmul = nullptr;
  Algorithm algorithm{};
  size_t workspace_bytes = 0;

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    if (matmul) library().matmul_destroy(matmul);
  }
};

MatrixProducts::MatrixProducts(bool row_invariant, int32_t max_rows)
    : row_invariant_(row_invariant), max_rows_(max_rows) {
  check_status(library().create(&handle_), "cublasLtCreate");
  workspace_ = DeviceBuffer(kProductWorkspace);
}

MatrixProducts::~MatrixProducts() {
  plans_.clear();
  if (handle_) library().destroy(handle_);
}

MatrixProducts::Key MatrixProducts::key_of(const MatmulParams& p) const {
  const auto alignment = [](const void* pointer) {
    return static_cast<uint32_t>(
        power_of_two_in(reinterpret_cast<uintptr_t>(pointer), kMaxAligned));
  };
  return {.dtype = p.dtype,
          .out_dtype = p.out_dtype,
          .weight_is_kn = p.weight_is_kn,
          .has_bias = p.bias != nullptr,
          .rows = row_invariant_
                      ? max_rows_
                      : static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(p.rows))),
          .n = p.n,
          .k = p.k,
          .x_stride = p.x_stride,
          .weight_stride = p.weight_stride,
          .out_stride = p.out_stride,
          .x_alignment = alignment(p.x),
          .weight_alignment = alignment(p.weight),
          .out_alignment = alignment(p.out)};
}

std::unique_ptr<MatrixProducts::Plan> MatrixProducts::choose(const Key& key,
                                                             const void* bias) const {
  auto plan = std::make_unique<Plan>();
  check_status(library().matmul_create(&plan->matmul, kComputeF32, type_of(DType::f32)),
               "cublasLtMatmulDescCreate");
  const auto set = [&](DescriptorAttribute attribute, auto value) {
    check_status(library().matmul_set(plan->matmul, attribute, &value, sizeof(value)),
                 "cublasLtMatmulDescSetAttribute");
  };
  if (!key.weight_is_kn) set(kTransposeA, kTransposed);
  if (key.has_bias) {
    set(kEpilogue, kEpilogueBias);
    set(kBiasType, type_of(key.out_dtype));
    set(kBiasPointer, bias);
  }
  const Preference preference;
  const auto prefer = [&](PreferenceAttribute attribute, auto value) {
    check_status(library().preference_set(preference.handle, attribute, &value, sizeof(value)),
                 "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(kWorkspaceBytes, workspace_.bytes());
  prefer(kWeightAlignment, key.weight_alignment);
  prefer(kXAlignment, key.x_alignment);
  prefer(kOutAlignment, key.out_alignment);
  prefer(kResultAlignment, key.out_alignment);
  const Layouts layouts(key);
  Heuristic heuristic{};
  int results = 0;
  const Status status = library().heuristic(
      handle_, plan->matmul, layouts.weight.handle, layouts.x.handle, layouts.out.handle,
      layouts.out.handle, preference.handle, 1, &heuristic, &results);
  if (status != 0 || results == 0) {
    fail(ErrorCode::unsupported,
         "cuBLASLt has no algorithm for {} rows, n {}, k {}, {} to {} (status {})", key.rows, key.n,
         key.k, dtype_name(key.dtype), dtype_name(key.out_dtype), status);
  }
  plan->algorithm = heuristic.algorithm;
  plan->workspace_bytes = heuristic.workspace_bytes;
  return plan;
}

void MatrixProducts::run(const MatmulParams& params, Stream stream) {
  if (params.rows == 0 || params.n == 0) return;
  const Key key = key_of(params);
  std::unique_ptr<Plan>& found = plans_[key];
  if (!found) found = choose(key, params.bias);
  const Plan& chosen = *found;
  if (params.bias) {
    check_status(library().matmul_set(chosen.matmul, kBiasPointer, &params.bias, sizeof(void*)),
                 "cublasLtMatmulDescSetAttribute");
  }
  const Layouts layouts(params);
  const float one = 1, zero = 0;
  const Status status = library().matmul(
      handle_, chosen.matmul, &one, params.weight, layouts.weight.handle, params.x,
      layouts.x.handle, &zero, params.out, layouts.out.handle, params.out, layouts.out.handle,
      &chosen.algorithm, workspace_.data(), chosen.workspace_bytes, stream);
  if (status != 0) {
    fail(ErrorCode::device_failure, "cublasLtMatmul: {} rows, n {}, k {}: status {}", params.rows,
         params.n, params.k, status);
  }
}

}  // namespace fovea::gpu
