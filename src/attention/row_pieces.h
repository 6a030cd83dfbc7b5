// SPDX-License-Identifier: Apache-2.0
// The bytes that a token has in pools.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/kv_cache.h"
#include "kernels/drafts.h"

namespace fovea {

// Returns everything that is stored for a token, in pieces of at most max_bytes (a multiple of 16):
// keys, values, latents and scales per token of every layer of every pool. Throws
// Error{unsupported} naming the pool if the bytes of a GPU's pool are not multiples of 4.
std::vector<kernels::RowPiece> row_pieces(std::span<KvPool* const> pools, int32_t max_bytes);

}  // namespace fovea
