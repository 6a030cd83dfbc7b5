// SPDX-License-Identifier: Apache-2.0
// The index of a kernel pack: one line of text per kernel, with fields `key=value` in a fixed
// order, separated by tabs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gpu/nvrtc.h"

namespace fovea::gpu {

struct PackIndexEntry {
  std::string name;
  std::string hash;          // content_hash() of the variant
  uint64_t offset = 0;       // frame's position from the end of the index
  uint64_t frame_bytes = 0;  // bytes of the compressed cubin
  uint64_t cubin_bytes = 0;
  double seconds = 0;  // compile time
  ResourceUse resources;
};

// Returns the line that parse_pack_index() reads, including its line end.
std::string pack_index_line(const PackIndexEntry& entry);

// Parses all lines. Throws Error{corrupt_file} naming the pack at `path` and the field that is
// malformed or exceeds its limit.
std::vector<PackIndexEntry> parse_pack_index(const std::string& path, std::string_view text);

}  // namespace fovea::gpu
