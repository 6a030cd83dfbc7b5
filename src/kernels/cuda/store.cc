// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/store.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "fovea/error.h"
#include "fovea/kernel_pack.h"

namespace fovea::kernels::cuda {
namespace {

// Returns the path of the pack in the folder of `file`, or an empty path.
std::string pack_next_to(const std::filesystem::path& file) {
  std::error_code ignored;
  const auto pack = file.parent_path() / "kernels.pack";
  return !file.empty() && std::filesystem::exists(pack, ignored) ? pack.string() : "";
}

// Returns the shared library or the program that contains this code.
std::filesystem::path own_file() {
  static const char inside = 0;
  Dl_info info;
  return dladdr(&inside, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

std::string default_pack() {
  std::error_code ignored;
  const std::string pack = pack_next_to(std::filesystem::read_symlink("/proc/self/exe", ignored));
  return pack.empty() ? pack_next_to(own_file()) : pack;
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
  options.pack_path = pack != nullptr ? pack : default_pack();
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
