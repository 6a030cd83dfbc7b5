// SPDX-License-Identifier: Apache-2.0
// The GPU kernels that ship compiled with the library. Building them needs NVRTC and no GPU.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

// One kernel of the baked set.
struct KernelListing {
  std::string name;    // "portable/attention/128_128_bf16_bf16.sm80"
  std::string family;  // "portable/attention"
  int sm = 0;
  bool packed = false;  // up to date in the pack that was asked about
  size_t cubin_bytes = 0;
  int registers = 0;
  int spill_bytes = 0;   // stored and loaded again, a thread
  int shared_bytes = 0;  // static
  int dynamic_shared_bytes = 0;
  int threads = 0;        // of a block
  int blocks_per_sm = 0;  // that fit an SM by registers, threads and shared memory
  double compile_seconds = 0;
  std::string losses;  // the assembler's notes of potential performance losses, a line each
};

struct KernelBuildOptions {
  std::string pack_path = {};
  std::string only = {};                                // compile only names that contain this
  int threads = 0;                                      // 0: one per core
  std::function<void(std::string_view)> progress = {};  // may throw: the pack keeps what compiled
};

// Compiles what is missing or stale in the pack and writes it; what is up to date by content stays.
// Error{unsupported} without NVRTC, or naming the kernel and the compiler's log;
// Error{invalid_argument} where `only` names no kernel; Error{io} or {corrupt_file} naming the
// pack.
std::vector<KernelListing> build_kernel_pack(const KernelBuildOptions& options);

// The baked set, with figures where the pack at `pack_path` has them; empty: there is none.
// Error{io} where there is no such file, Error{corrupt_file} where it is no pack.
std::vector<KernelListing> list_kernels(const std::string& pack_path);

// Where this process takes GPU kernels from, in this order: the pack, the cache folder, the
// compiler. FOVEA_KERNEL_PACK names the pack (default: kernels.pack beside the program),
// FOVEA_KERNEL_CACHE the folder (default: fovea in $XDG_CACHE_HOME or ~/.cache; empty: none), and
// FOVEA_JIT=0 forbids compiling.
struct KernelSources {
  std::string pack_path;        // empty: there is none
  std::string why_no_pack;      // pack_path and why it cannot be read; empty where it can
  std::string cache_path;       // empty: there is none
  std::string compiler;         // "NVRTC 13.0"; empty: there is none, or it is forbidden
  std::string why_no_compiler;  // empty: what is missing is compiled when a backend is created
};
KernelSources kernel_sources();

}  // namespace fovea
