// SPDX-License-Identifier: Apache-2.0
// Device source to machine code. NVRTC needs no GPU, so kernel packs are built anywhere.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fovea::gpu {

struct CompileInput {
  std::string program;                                       // text of the translation unit
  std::string name;                                          // in messages
  std::vector<std::pair<std::string, std::string>> headers;  // name as included -> text
  std::vector<std::string> flags;                            // all of them
};

struct CompileOutput {
  std::string cubin;
  std::string log;
  double seconds = 0;
};

// What the assembler reports: registers, spills and stack of an entry point, and where it gave up
// speed.
struct ResourceUse {
  int registers = 0;
  int spill_bytes = 0;
  int stack_bytes = 0;
  int shared_bytes = 0;  // static
  // Its notes of potential performance losses (C7500 and up: wgmma serialised, setmaxnreg ignored)
  // in any function, a line each; empty: none.
  std::string losses;
};

// Empty when NVRTC can be used; otherwise why not.
const std::string& why_no_nvrtc();
// "13.0"; part of every cache key.
std::string nvrtc_version();

// Error{unsupported} without NVRTC or with the compiler's log when the program does not compile.
CompileOutput compile(const CompileInput& input);

// Reads the assembler's `-v` report in `log` of the entry point `symbol`.
ResourceUse parse_resource_use(std::string_view log, std::string_view symbol);

}  // namespace fovea::gpu
