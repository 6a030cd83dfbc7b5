// SPDX-License-Identifier: Apache-2.0
// Compiles device source to machine code. NVRTC needs no GPU, so any machine can build kernel
// packs.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fovea::gpu {

struct CompileInput {
  std::string program;                                       // text of the translation unit
  std::string name;                                          // appears in messages
  std::vector<std::pair<std::string, std::string>> headers;  // text by the included name
  std::vector<std::string> flags;                            // complete list
};

struct CompileOutput {
  std::string cubin;
  std::string log;
  double seconds = 0;
};

// The assembler's report: registers, spills and stack of an entry point, and performance losses.
struct ResourceUse {
  int registers = 0;
  int spill_bytes = 0;
  int stack_bytes = 0;
  int shared_bytes = 0;  // static only
  // Notes of potential performance losses (C7500 and up: wgmma serialised, setmaxnreg ignored) in
  // any function, one per line. Empty if there are none.
  std::string losses;
};

// Returns an empty string if NVRTC can be used, otherwise the reason.
const std::string& why_no_nvrtc();
// Returns the version, such as "13.0", which is a part of every cache key.
std::string nvrtc_version();

// Throws Error{unsupported} if NVRTC is missing, or with the compiler's log if the program does not
// compile.
CompileOutput compile(const CompileInput& input);

// Parses the assembler's `-v` report on the entry point `symbol` in `log`.
ResourceUse parse_resource_use(std::string_view log, std::string_view symbol);

}  // namespace fovea::gpu
