// SPDX-License-Identifier: Apache-2.0
// The library's own backends, one constructor per row.
#pragma once

#include <vector>

#include "fovea/select_backend.h"

namespace fovea {

struct CudaKernels;
struct HostKernels;
struct MlaKernels;

// backends.cc: THE list, in order of preference.
std::vector<BackendEntry> builtin_backends();

BackendEntry flash_backend();
BackendEntry portable_backend();
BackendEntry mla_backend();
BackendEntry portable_mla_backend();
BackendEntry cpu_backend();
BackendEntry linear_backend();
BackendEntry linear_cuda_backend();
BackendEntry reference_backend();

// The tables of kernels that the rows are made of.
const CudaKernels& flash_kernels();
const CudaKernels& portable_kernels();
const MlaKernels& mla_kernels();
const MlaKernels& portable_mla_kernels();
const HostKernels& cpu_kernels();
const HostKernels& linear_kernels();
const HostKernels& reference_kernels();

// Known names without code in this build: GPU roles, other vendors and compositions.
std::vector<BackendEntry> missing_gpu_backends();
std::vector<BackendEntry> unported_backends();

}  // namespace fovea
