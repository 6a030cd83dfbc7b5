// SPDX-License-Identifier: Apache-2.0
// Loads cuBLASLt's functions at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fovea/device.h"

namespace fovea::gpu::cublaslt {

// The used part of its binary interface (cuBLAS 12 and later).
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

constexpr int kComputeF32 = 68;
constexpr int kTransposed = 1;
enum DescriptorAttribute : int {
  kTransposeA = 3,
  kEpilogue = 7,
  kBiasPointer = 8,
  kFastAccumulation = 25,
  kBiasType = 26
};
enum PreferenceAttribute : int {
  kWorkspaceBytes = 1,
  kWeightAlignment = 5,
  kXAlignment,
  kOutAlignment,
  kResultAlignment
};

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
  std::string problem;  // reason why it cannot be used; otherwise empty
};

// Loads the library once.
const Library& loaded();
// Throws Error{unsupported} with the problem, if any.
const Library& library();
// Throws Error{unsupported} naming the call and its status.
void check_status(Status status, std::string_view call);

}  // namespace fovea::gpu::cublaslt
