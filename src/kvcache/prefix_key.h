// SPDX-License-Identifier: Apache-2.0
// The bytes that are hashed into prefix keys: every field carries a tag and its length.
#pragma once

#include <span>
#include <string>

#include "core/sha256.h"
#include "fovea/prefix_cache.h"

namespace fovea {

// Different domains give different bytes; the hash of the bytes is the root's key.
std::string serialise(const PrefixDomain& domain);
PrefixKey hash_domain(Sha256& hash, const std::string& serialised);
PrefixKey hash_page(Sha256& hash, const PrefixKey& parent, std::span<const int32_t> tokens);

}  // namespace fovea
