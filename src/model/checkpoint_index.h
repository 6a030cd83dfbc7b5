// SPDX-License-Identifier: Apache-2.0
// Reads model.safetensors.index.json, which maps each tensor of a checkpoint to a shard.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

struct CheckpointIndex {
  struct Entry {
    std::string tensor;
    uint32_t shard = 0;  // index into shards
  };
  std::vector<std::string> shards;  // plain file names, in the order of their first mention
  std::vector<Entry> entries;       // sorted by tensor, without duplicates
};

// Reads the text of an index. Throws Error{corrupt_file} naming `name`, the tensor and the shard if
// the text has no weight_map, a tensor twice, or a shard outside the folder. Takes memory in
// proportion to the text.
CheckpointIndex read_checkpoint_index(std::string_view text, std::string_view name);

}  // namespace fovea
