// SPDX-License-Identifier: Apache-2.0
#include "gpu/nvrtc.h"

#include <dlfcn.h>

#include <chrono>

#include "core/check.h"

namespace fovea::gpu {
namespace {

using Program = struct NvrtcProgram*;
using Result = int;

#define FOVEA_NVRTC_FUNCTIONS(X)                                                       \
  X(version, "nvrtcVersion", (int*, int*))                                             \
  X(create, "nvrtcCreateProgram",                                                      \
    (Program*, const char*, const char*, int, const char* const*, const char* const*)) \
  X(destroy, "nvrtcDestroyProgram", (Program*))                                        \
  X(compile, "nvrtcCompileProgram", (Program, int, const char* const*))                \
  X(log_size, "nvrtcGetProgramLogSize", (Program, size_t*))                            \
  X(log, "nvrtcGetProgramLog", (Program, char*))                                       \
  X(cubin_size, "nvrtcGetCUBINSize", (Program, size_t*))                               \
  X(cubin, "nvrtcGetCUBIN", (Program, char*))

struct Nvrtc {
#define FOVEA_DECLARE(member, name, parameters) Result(*member) parameters = nullptr;
  FOVEA_NVRTC_FUNCTIONS(FOVEA_DECLARE)
#undef FOVEA_DECLARE
  std::string problem;
};

Nvrtc load() {
  Nvrtc nvrtc;
  void* library = nullptr;
  // The newest version comes first: drivers that support any of these versions run its cubins.
  for (const char* name :
       {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so"}) {
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library) break;
  }
  if (!library) {
    nvrtc.problem = "no NVRTC: neither libnvrtc.so.13 nor libnvrtc.so.12 was found";
    return nvrtc;
  }
#define FOVEA_FIND(member, name, parameters)                                   \
  nvrtc.member = reinterpret_cast<Result(*) parameters>(dlsym(library, name)); \
  if (!nvrtc.member) nvrtc.problem = "this NVRTC has no " name;
  FOVEA_NVRTC_FUNCTIONS(FOVEA_FIND)
#undef FOVEA_FIND
  return nvrtc;
}

const Nvrtc& nvrtc() {
  static const Nvrtc loaded = load();
  return loaded;
}

// Owns the program object of one compilation.
struct OwnedProgram {
  Program handle = nullptr;
  ~OwnedProgram() {
    if (handle) nvrtc().destroy(&handle);
  }
};

std::string program_log(Program program) {
  size_t size = 0;
  nvrtc().log_size(program, &size);
  std::string log(size, '\0');
  if (size) nvrtc().log(program, log.data());
  while (!log.empty() && log.back() == '\0') log.pop_back();
  return log;
}

int number_before(std::string_view line, std::string_view words) {
  const size_t end = line.find(words);
  if (end == std::string_view::npos) return 0;
  size_t begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  return std::atoi(std::string(line.substr(begin, end - begin)).c_str());
}

}  // namespace

const std::string& why_no_nvrtc() { return nvrtc().problem; }

std::string nvrtc_version() {
  int major = 0;
  int minor = 0;
  if (why_no_nvrtc().empty()) nvrtc().version(&major, &minor);
  return fmt::format("{}.{}", major, minor);
}

CompileOutput compile(const CompileInput& input) {
  if (!why_no_nvrtc().empty()) fail(ErrorCode::unsupported, "{}", why_no_nvrtc());
  std::vector<const char*> names;
  std::vector<const char*> texts;
  for (const auto& [name, text] : input.headers) {
    names.push_back(name.c_str());
    texts.push_back(text.c_str());
  }
  OwnedProgram program;
  if (nvrtc().create(&program.handle, input.program.c_str(), input.name.c_str(),
                     static_cast<int>(names.size()), texts.data(), names.data()) != 0) {
    fail(ErrorCode::unsupported, "{}: NVRTC refused the program", input.name);
  }
  std::vector<const char*> arguments;
  for (const std::string& flag : input.flags) arguments.push_back(flag.c_str());

  const auto start = std::chrono::steady_clock::now();
  const Result result =
      nvrtc().compile(program.handle, static_cast<int>(arguments.size()), arguments.data());
  CompileOutput output;
  output.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  output.log = program_log(program.handle);
  if (result != 0) fail(ErrorCode::unsupported, "{} does not compile:\n{}", input.name, output.log);
  size_t size = 0;
  nvrtc().cubin_size(program.handle, &size);
  output.cubin.resize(size);
  nvrtc().cubin(program.handle, output.cubin.data());
  return output;
}

ResourceUse parse_resource_use(std::string_view log, std::string_view symbol) {
  ResourceUse use;
  // Lines of the report: "Compiling entry function 'NAME' for ..." | "Function properties for NAME"
  // | "N bytes stack frame, N bytes spill stores, N bytes spill loads" | "Used N registers, ... N
  // bytes smem" | "ptxas info    : (C7510) Potential Performance Loss: ... in the function 'NAME'".
  bool inside = false;
  for (size_t at = 0; at < log.size();) {
    const size_t end = std::min(log.find('\n', at), log.size());
    const std::string_view line = log.substr(at, end - at);
    at = end + 1;
    if (line.find("Potential Performance Loss") != std::string_view::npos) {
      const std::string_view note = line.substr(std::min(line.find("(C"), line.size()));
      use.losses += (use.losses.empty() ? "" : "\n") + std::string(note.empty() ? line : note);
    }
    if (line.find("Compiling entry function") != std::string_view::npos) {
      inside = line.find(symbol) != std::string_view::npos;
    }
    if (!inside) continue;
    if (line.find("bytes stack frame") != std::string_view::npos) {
      use.stack_bytes += number_before(line, " bytes stack frame");
      use.spill_bytes +=
          number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
    }
    if (line.find(" registers") != std::string_view::npos) {
      use.registers = number_before(line, " registers");
      use.shared_bytes = number_before(line, " bytes smem");
    }
  }
  return use;
}

}  // namespace fovea::gpu
