// SPDX-License-Identifier: Apache-2.0
#include "gpu/cublaslt.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <vector>

#include "core/check.h"

namespace fovea::gpu {
namespace {

// The parts of cuBLASLt's binary interface used here (cuBLAS 12 and later).
using Status = int;
using Handle = void*;
using Descriptor = void*;
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Heuristic) == 96);

enum DescriptorAttribute : int { kTransposeA = 3, kEpilogue = 7, kBiasPointer = 8, kBiasType = 26 };
enum PreferenceAttribute : int {
  kWorkspaceBytes = 1,
  kWeightAlignment = 5,
  kXAlignment,
  kOutAlignment,
  kResultAlignment
};
constexpr int kComputeF32 = 68;
constexpr int kTransposed = 1;
constexpr int kEpilogueBias = 4;

#define FOVEA_CUBLASLT_FUNCTIONS(X)                                                               \
  X(create, "cublasLtCreate", (Handle*))                                                          \
  X(destroy, "cublasLtDestroy", (Handle))                                                         \
  X(matmul_create, "cublasLtMatmulDescCreate", (Descriptor*, int, int))                           \
  X(matmul_destroy, "cublasLtMatmulDescDestroy", (Descriptor))                                    \
  X(matmul_set, "cublasLtMatmulDescSetAttribute", (Descriptor, int, const void*, size_t))         \
  X(layout_create, "cublasLtMatrixLayoutCreate", (Descriptor*, int, uint64_t, uint64_t, int64_t)) \
  X(layout_destroy, "cublasLtMatrixLayoutDestroy", (Descriptor))                                  \
  X(preference_create, "cublasLtMatmulPreferenceCreate", (Descriptor*))                           \
  X(preference_destroy, "cublasLtMatmulPreferenceDestroy", (Descriptor))                          \
  X(preference_set, "cublasLtMatmulPreferenceSetAttribute",                                       \
    (Descriptor, int, const void*, size_t))                                                       \
  X(heuristic, "cublasLtMatmulAlgoGetHeuristic",                                                  \
    (Handle, Descriptor, Descriptor, Descriptor, Descriptor, Descriptor, Descriptor, int,         \
     Heuristic*, int*))                                                                           \
  X(matmul, "cublasLtMatmul",                                                                     \
    (Handle, Descriptor, const void*, const void*, Descriptor, const void*, Descriptor,           \
     const void*, const void*, Descriptor, void*, Descriptor, const Algorithm*, void*, size_t,    \
     Stream))

struct Library {
#define FOVEA_DECLARE(member, name, parameters) Status(*member) parameters = nullptr;
  FOVEA_CUBLASLT_FUNCTIONS(FOVEA_DECLARE)
#undef FOVEA_DECLARE
  std::string problem;
};

// <prefix>/lib/python3.x/site-packages/nvidia/{cu13,cublas}/lib of every <prefix>/bin on PATH.
void append_python_packages(std::vector<std::string>& candidates) {
  namespace fs = std::filesystem;
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');) {
    std::error_code ignored;
    const fs::path lib = fs::path(folder).parent_path() / "lib";
    for (const fs::directory_entry& entry : fs::directory_iterator(lib, ignored)) {
      if (!entry.path().filename().string().starts_with("python3")) continue;
      for (const char* file : {"cu13/lib/libcublasLt.so.13", "cublas/lib/libcublasLt.so.12"}) {
        const fs::path candidate = entry.path() / "site-packages" / "nvidia" / file;
        if (fs::exists(candidate, ignored)) candidates.push_back(candidate.string());
      }
    }
  }
}

std::vector<std::string> candidates() {
  if (const char* given = std::getenv("FOVEA_CUBLASLT")) return {given};
  std::vector<std::string> found = {"libcublasLt.so.13", "libcublasLt.so.12",
                                    "/usr/local/cuda/lib64/libcublasLt.so.13",
                                    "/usr/local/cuda/lib64/libcublasLt.so.12"};
  append_python_packages(found);
  return found;
}

Library load() {
  Library library;
  void* opened = nullptr;
  std::string tried;
  for (const std::string& name : candidates()) {
    opened = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (opened) break;
    tried += (tried.empty() ? "" : ", ") + name;
  }
  if (!opened) {
    library.problem = "no cuBLASLt: tried " + tried +
                      "; install the CUDA toolkit or the PyPI package nvidia-cublas, or name the "
                      "file in FOVEA_CUBLASLT";
    return library;
  }
#define FOVEA_FIND(member, name, parameters)                                    \
  library.member = reinterpret_cast<Status(*) parameters>(dlsym(opened, name)); \
  if (!library.member) library.problem = "this cuBLASLt has no " name;
  FOVEA_CUBLASLT_FUNCTIONS(FOVEA_FIND)
#undef FOVEA_FIND
  return library;
}

const Library& loaded() {
  static const Library library = load();
  return library;
}

const Library& library() {
  if (!loaded().problem.empty()) fail(ErrorCode::unsupported, "{}", loaded().problem);
  return loaded();
}

void check_status(Status status, std::string_view call) {
  if (status != 0) fail(ErrorCode::unsupported, "{}: status {}", call, status);
}

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
  // Column-major, as cuBLAS counts: `rows` are contiguous.
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

// In column-major words: out^T [n, rows] = weight [n, k] * x^T [k, rows].
struct Layouts {
  Layouts(const MatmulParams& p, int64_t rows)
      : weight(p.dtype, p.weight_is_kn ? p.n : p.k, p.weight_is_kn ? p.k : p.n, p.weight_stride),
        x(p.dtype, p.k, rows, p.x_stride),
        out(p.out_dtype, p.n, rows, p.out_stride) {}
  Layout weight, x, out;
};

constexpr size_t kWorkspace = size_t{32} << 20;
constexpr uint32_t kMostAligned = 256;  // bytes that cuBLASLt distinguishes

}  // namespace

const std::string& why_no_cublaslt() { return loaded().problem; }

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
  workspace_ = DeviceBuffer(kWorkspace);
}

MatrixProducts::~MatrixProducts() {
  plans_.clear();
  if (handle_) library().destroy(handle_);
}

const MatrixProducts::Plan& MatrixProducts::plan(const MatmulParams& p) {
  const auto rows = row_invariant_
                        ? max_rows_
                        : static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(p.rows)));
  const auto alignment = [](const void* pointer) {
    return std::min(kMostAligned, 1u << std::countr_zero(reinterpret_cast<uintptr_t>(pointer)));
  };
  const uint32_t weight_alignment = alignment(p.weight), x_alignment = alignment(p.x),
                 out_alignment = alignment(p.out);
  const int kind = type_of(p.dtype) + 16 * type_of(p.out_dtype) + 256 * p.weight_is_kn +
                   512 * (p.bias != nullptr) + 1024 * std::countr_zero(weight_alignment) +
                   16384 * std::countr_zero(x_alignment) + 262144 * std::countr_zero(out_alignment);
  std::unique_ptr<Plan>& found =
      plans_[{rows, p.n, p.k, p.x_stride, p.weight_stride, p.out_stride, kind}];
  if (found) return *found;

  auto plan = std::make_unique<Plan>();
  check_status(library().matmul_create(&plan->matmul, kComputeF32, type_of(DType::f32)),
               "cublasLtMatmulDescCreate");
  const auto set = [&](DescriptorAttribute attribute, auto value) {
    check_status(library().matmul_set(plan->matmul, attribute, &value, sizeof(value)),
                 "cublasLtMatmulDescSetAttribute");
  };
  if (!p.weight_is_kn) set(kTransposeA, kTransposed);
  if (p.bias) {
    set(kEpilogue, kEpilogueBias);
    set(kBiasType, type_of(p.out_dtype));
    set(kBiasPointer, p.bias);
  }
  struct Preference {
    Descriptor handle = nullptr;
    ~Preference() {
      if (handle) library().preference_destroy(handle);
    }
  } preference;
  check_status(library().preference_create(&preference.handle), "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](PreferenceAttribute attribute, auto value) {
    check_status(library().preference_set(preference.handle, attribute, &value, sizeof(value)),
                 "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(kWorkspaceBytes, workspace_.bytes());
  prefer(kWeightAlignment, weight_alignment);
  prefer(kXAlignment, x_alignment);
  prefer(kOutAlignment, out_alignment);
  prefer(kResultAlignment, out_alignment);
  const Layouts layouts(p, rows);
  Heuristic heuristic{};
  int results = 0;
  const Status status = library().heuristic(
      handle_, plan->matmul, layouts.weight.handle, layouts.x.handle, layouts.out.handle,
      layouts.out.handle, preference.handle, 1, &heuristic, &results);
  if (status != 0 || results == 0) {
    fail(ErrorCode::unsupported,
         "cuBLASLt has no algorithm for {} rows, n {}, k {}, {} to {} (status {})", rows, p.n, p.k,
         dtype_name(p.dtype), dtype_name(p.out_dtype), status);
  }
  plan->algorithm = heuristic.algorithm;
  plan->workspace_bytes = heuristic.workspace_bytes;
  found = std::move(plan);
  return *found;
}

void MatrixProducts::run(const MatmulParams& params, Stream stream) {
  if (params.rows == 0 || params.n == 0) return;
  const Plan& chosen = plan(params);
  if (params.bias) {
    check_status(library().matmul_set(chosen.matmul, kBiasPointer, &params.bias, sizeof(void*)),
                 "cublasLtMatmulDescSetAttribute");
  }
  const Layouts layouts(params, params.rows);
  const float one = 1, zero = 0;
  const Status status = library().matmul(
      handle_, chosen.matmul, &one, params.weight, layouts.weight.handle, params.x,
      layouts.x.handle, &zero, params.out, layouts.out.handle, params.out, layouts.out.handle,
      &chosen.algorithm, workspace_.data(), chosen.workspace_bytes, stream);
  if (status != 0) {
    fail(ErrorCode::unsupported, "cublasLtMatmul: {} rows, n {}, k {}: status {}", params.rows,
         params.n, params.k, status);
  }
}

}  // namespace fovea::gpu
