// SPDX-License-Identifier: Apache-2.0
// Calls of the C interface with arguments made from bytes: handles, struct sizes, DLTensors, sizes,
// enums and contents of arrays.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace fovea::test {

struct FuzzCount {
  int64_t calls = 0;
  int64_t accepted = 0;
};

// Makes one call for each few bytes. Returns the first violation, a call that failed without naming
// an argument; empty: there is none. A crash or a report of a sanitizer is a violation, too.
std::string fuzz_calls(std::span<const uint8_t> data, FuzzCount& count);

}  // namespace fovea::test
