// SPDX-License-Identifier: Apache-2.0
// The handler for SIGBUS behind MappedFile, and the list of mappings it answers for.
#pragma once

#include <cstddef>

namespace fovea {

struct Mapping;

// Installs the handler with the first call. The result is not watched yet. May throw
// std::bad_alloc, so it is called before there is anything to watch.
Mapping* take_mapping();
// From now on missing pages of [begin, begin + bytes) become zeros. begin is aligned to a page.
void watch(Mapping* mapping, const std::byte* begin, size_t bytes) noexcept;
// Whether pages were missing.
bool is_damaged(const Mapping* mapping) noexcept;
// Ends the watch; the memory may be unmapped afterwards.
void release_mapping(Mapping* mapping) noexcept;

}  // namespace fovea
