// SPDX-License-Identifier: Apache-2.0
// Integer names, storage types and the entry point of every kernel.
#pragma once

#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else  // tests/emulation
#include <cstdint>
#endif

namespace fovea::kernels::cuda {

// Values of the columns of variants.txt.
enum Type : int { f32, f16, bf16, f8e4m3, f8e5m2 };

constexpr int type_bytes(Type type) {
  return type == f32 ? 4 : type == f16 || type == bf16 ? 2 : 1;
}

// Dynamic shared memory that a block may have on sm_90.
constexpr int kMaxSharedBytes = 232448;

// The facts that the host needs to launch a variant. It reads them from the loaded module, so that
// they are written once.
struct KernelTraits {
  int threads;       // a block
  int shared_bytes;  // dynamic, a block
  int row_tile;      // query rows of a work item
  int key_tile;      // keys of one step
};

}  // namespace fovea::kernels::cuda

// FOVEA_KERNEL_ENTRY(Config<...>): the family defines Config with Params, kTraits, kBlocksPerSm and
// static void run(const Params&).
#define FOVEA_KERNEL_ENTRY(...)                                                                   \
  using Entry = __VA_ARGS__;                                                                      \
  extern "C" __constant__ const fovea::kernels::cuda::KernelTraits fovea_traits = Entry::kTraits; \
  extern "C" __global__ void __launch_bounds__(Entry::kTraits.threads, Entry::kBlocksPerSm)       \
      fovea_kernel(const __grid_constant__ Entry::Params params) {                                \
    Entry::run(params);                                                                           \
  }
