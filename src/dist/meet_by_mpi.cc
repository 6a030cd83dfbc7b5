// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "core/check.h"
#include "core/quote.h"
#include "dist/mpi_plug_in.h"
#include "fovea/process_ranks.h"

namespace fovea {
namespace {

std::string plug_in_next_to_program() {
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  return (program.parent_path() / "fovea_mpi.so").string();
}

}  // namespace

int mpi_process_count() {
  for (const char* const name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    const char* const value = std::getenv(name);
    if (value == nullptr) continue;
    const std::string_view digits = value;
    int count = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), count);
    if (error == std::errc() && end == digits.data() + digits.size()) return count;
  }
  return 0;
}

std::unique_ptr<Communicator> meet_by_mpi(const std::string& given) {
  const char* const named = std::getenv("FOVEA_MPI");
  const std::string path = !given.empty()     ? given
                           : named != nullptr ? named
                                              : plug_in_next_to_program();
  void* const opened = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);  // stays open
  if (opened == nullptr) {
    const char* const reason = dlerror();
    fail(ErrorCode::unsupported,
         "the processes of mpiexec cannot be joined, because the plug-in for MPI cannot be loaded "
         "(built where CMake finds an MPI): {}",
         reason != nullptr ? reason : "");
  }
  const auto join = reinterpret_cast<JoinMpi>(dlsym(opened, kJoinMpi));
  if (join == nullptr) {
    fail(ErrorCode::unsupported, "{} has no {}, it belongs to another version", printable(path),
         kJoinMpi);
  }
  CommunicatorFunctions functions;
  if (const char* const problem = join(&functions); problem != nullptr) {
    fail(ErrorCode::device_failure, "MPI: {}", problem);
  }
  return make_communicator(functions);
}

}  // namespace fovea
