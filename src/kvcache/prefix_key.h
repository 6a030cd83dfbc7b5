// SPDX-License-Identifier: Apache-2.0
// The byte strings that prefix keys hash. Every field has a tag and a length.
#pragma once

#include <span>
#include <string>

#include "core/sha256.h"
#include "fovea/prefix_cache.h"

namespace fovea {

// Returns different bytes for different domains. Their hash is the key of the root.
std::string serialise(const PrefixDomain& domain);
PrefixKey hash_domain(Sha256& hash, const std::string& serialised);
PrefixKey hash_page(Sha256& hash, const PrefixKey& parent, std::span<const int32_t> tokens);

}  // namespace fovea
