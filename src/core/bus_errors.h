// SPDX-License-Identifier: Apache-2.0
// The SIGBUS handler of MappedFile, and the list of mappings that it protects.
#pragma once

#include <cstddef>

namespace fovea {

struct Mapping;

// Returns a mapping that is not watched yet. The first call installs the handler. May throw
// std::bad_alloc, so callers take the mapping before they map the file.
Mapping* take_mapping();
// From now on, missing pages of [begin, begin + bytes) read as zeros. `begin` is page-aligned.
void watch(Mapping* mapping, const std::byte* begin, size_t bytes) noexcept;
// Returns true if pages were missing.
bool is_damaged(const Mapping* mapping) noexcept;
// Ends the watch. The memory may then be unmapped.
void release_mapping(Mapping* mapping) noexcept;

}  // namespace fovea
