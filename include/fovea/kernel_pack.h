// SPDX-License-Identifier: Apache-2.0
// Packs of compiled GPU kernels. Building one needs NVRTC but no GPU.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/api.h"

namespace FOVEA_API fovea {

// One kernel of the set that packs hold.
struct KernelListing {
  std::string name;    // "portable/attention/128_128_bf16_bf16.sm80"
  std::string family;  // "portable/attention"
  int sm = 0;
  bool packed = false;  // the pack has it, up to date; the figures below are from there
  size_t cubin_bytes = 0;
  int registers = 0;
  int spill_bytes = 0;   // stored and loaded, per thread
  int shared_bytes = 0;  // static
  int dynamic_shared_bytes = 0;
  int threads = 0;        // per block
  int blocks_per_sm = 0;  // by registers, threads and shared memory
  double compile_seconds = 0;
  std::string losses;  // the assembler's warnings of potential performance loss, one per line
};

struct KernelBuildOptions {
  std::string pack_path = {};
  std::string only = {};  // compile only names that contain this
  int threads = 0;        // 0: one per core
  // Called for each kernel. May throw; the pack then holds the kernels compiled so far.
  std::function<void(std::string_view)> progress = {};
};

// Compiles the kernels that are missing or out of date in the pack, writes the pack, and returns
// all of its kernels. Throws Error{unsupported} without NVRTC, or naming the kernel with the
// compiler's log; Error{invalid_argument} if `only` matches no kernel; Error{io} or {corrupt_file}
// naming the pack.
std::vector<KernelListing> build_kernel_pack(const KernelBuildOptions& options);

// Returns the set of kernels, with figures of those in the pack at `pack_path`; an empty path means
// no pack. Throws Error{io} if the file does not exist, Error{corrupt_file} if it is not a pack.
std::vector<KernelListing> list_kernels(const std::string& pack_path);

// The sources from which this process takes GPU kernels, in this order: the pack, the cache folder,
// the compiler. FOVEA_KERNEL_PACK names the pack (default: kernels.pack in the folder of the
// program, else of the shared library that contains Fovea), FOVEA_KERNEL_CACHE the folder (default:
// fovea in $XDG_CACHE_HOME or ~/.cache; empty: none), and FOVEA_JIT=0 forbids compiling.
struct KernelSources {
  std::string pack_path;        // empty: no pack
  std::string why_no_pack;      // pack_path and why it cannot be read; empty: it can be read
  std::string cache_path;       // empty: no cache
  std::string compiler;         // "NVRTC 13.0"; empty: none, or it is forbidden
  std::string why_no_compiler;  // empty: missing kernels are compiled when a backend is created
};
// Returns the sources of this process.
KernelSources kernel_sources();

}  // namespace fovea
