// SPDX-License-Identifier: Apache-2.0
// The index of a kernel pack: one line of text for each kernel, made of fields `key=value` in a
// fixed order with tabs between them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gpu/nvrtc.h"

namespace fovea::gpu {

struct PackIndexEntry {
  std::string name;
  std::string hash;          // of the variant: content_hash()
  uint64_t offset = 0;       // of the frame, from the end of the index
  uint64_t frame_bytes = 0;  // of the compressed cubin
  uint64_t cubin_bytes = 0;
  double seconds = 0;  // that it took to compile
  ResourceUse resources;
};

// Returns the line that parse_pack_index() reads, with its end.
std::string pack_index_line(const PackIndexEntry& entry);

// Parses all lines. Error{corrupt_file} names the pack at `path` and the field that is malformed
// or beyond its limit.
std::vector<PackIndexEntry> parse_pack_index(const std::string& path, std::string_view text);

}  // namespace fovea::gpu
