// SPDX-License-Identifier: Apache-2.0
#include "gpu/cublaslt_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <vector>

#include "core/check.h"

namespace fovea::gpu::cublaslt {
namespace {

// Appends <prefix>/lib/python3.x/site-packages/nvidia/{cu13,cublas}/lib for every <prefix>/bin on
// PATH.
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

}  // namespace

const Library& loaded() {
  static const Library library = load();
  return library;
}

const Library& library() {
  if (!loaded().problem.empty()) fail(ErrorCode::unsupported, "{}", loaded().problem);
  return loaded();
}

void check_status(Status status, std::string_view call) {
  if (status != 0) fail(ErrorCode::device_failure, "{}: status {}", call, status);
}

}  // namespace fovea::gpu::cublaslt
