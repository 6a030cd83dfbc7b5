// SPDX-License-Identifier: Apache-2.0
#include "dist/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "core/check.h"
#include "core/quote.h"

namespace fovea::nccl {
namespace {

template <typename Function>
void find(void* opened, const char* name, const std::string& path, Function& function) {
  function = reinterpret_cast<Function>(dlsym(opened, name));
  if (function == nullptr) {
    fail(ErrorCode::unsupported, "{} has no {}, NCCL 2.7 or later is needed", printable(path),
         name);
  }
}

}  // namespace

std::shared_ptr<const Library> load(const std::string& given) {
  const char* const named = std::getenv("FOVEA_NCCL");
  const std::string path = !given.empty() ? given : named != nullptr ? named : "libnccl.so.2";
  setenv("NCCL_NVLS_ENABLE", "0", 1);  // multicast is never used; NCCL reads it when it starts
  void* const opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open
  if (opened == nullptr) {
    const char* const reason = dlerror();
    fail(ErrorCode::unsupported, "NCCL cannot be loaded: {}", reason != nullptr ? reason : "");
  }
  auto library = std::make_shared<Library>();
#define FOVEA_FIND(member, name, parameters) find(opened, name, path, library->member);
  FOVEA_NCCL_FUNCTIONS(FOVEA_FIND)
#undef FOVEA_FIND
  find(opened, "ncclGetErrorString", path, library->error_text);
  library->init_rank_config = reinterpret_cast<decltype(library->init_rank_config)>(
      dlsym(opened, "ncclCommInitRankConfig"));
  return library;
}

}  // namespace fovea::nccl
