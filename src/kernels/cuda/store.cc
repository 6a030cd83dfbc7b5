// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/store.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "fovea/error.h"
#include "fovea/kernel_pack.h"

namespace fovea::kernels::cuda {
namespace {

std::string pack_of_program() {
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  const auto pack = program.parent_path() / "kernels.pack";
  return !program.empty() && std::filesystem::exists(pack, ignored) ? pack.string() : "";
}

std::string default_cache() {
  if (const char* base = std::getenv("XDG_CACHE_HOME"); base != nullptr && *base != '\0') {
    return std::string(base) + "/fovea";
  }
  const char* home = std::getenv("HOME");
  return home != nullptr && *home != '\0' ? std::string(home) + "/.cache/fovea" : "";
}

}  // namespace

gpu::KernelStoreOptions kernel_store_options() {
  const char* pack = std::getenv("FOVEA_KERNEL_PACK");
  const char* cache = std::getenv("FOVEA_KERNEL_CACHE");
  const char* jit = std::getenv("FOVEA_JIT");
  gpu::KernelStoreOptions options;
  options.pack_path = pack != nullptr ? pack : pack_of_program();
  options.cache_path = cache != nullptr ? cache : default_cache();
  options.allow_compile = jit == nullptr || std::string_view(jit) != "0";
  options.announce = [](std::string_view line) {
    std::fprintf(stderr, "fovea: %.*s\n", static_cast<int>(line.size()), line.data());
  };
  return options;
}

gpu::KernelStore& kernel_store() {
  static gpu::KernelStore store(kernel_store_options());
  return store;
}

}  // namespace fovea::kernels::cuda

namespace fovea {

KernelSources kernel_sources() {
  const gpu::KernelStoreOptions options = kernels::cuda::kernel_store_options();
  KernelSources sources{
      .pack_path = options.pack_path,
      .why_no_pack = {},
      .cache_path = options.cache_path,
      .compiler = {},
      .why_no_compiler = options.allow_compile ? gpu::why_no_nvrtc() : "forbidden by FOVEA_JIT=0"};
  if (sources.why_no_compiler.empty()) sources.compiler = "NVRTC " + gpu::nvrtc_version();
  try {
    if (!options.pack_path.empty()) gpu::KernelPack::open(options.pack_path);
  } catch (const Error& error) {
    sources.why_no_pack = error.what();
  }
  return sources;
}

}  // namespace fovea
