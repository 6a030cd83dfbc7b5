// SPDX-License-Identifier: Apache-2.0
// The host side that the Hopper MLA decode kernels share: how a layer is cut into blocks, and their
// parameters.
#pragma once

#include "kernels/cuda/mla_decode.h"

namespace fovea::kernels::cuda {

// Shape of a kernel's blocks, as its configuration has it.
struct MlaBlockShape {
  int32_t rows;          // query rows of a block
  uint32_t query_tiles;  // column tiles of latent queries in a box that holds all rows
  uint32_t key_tiles;    // column tiles of keys in a box; unused where keys are loaded row by row
};

// Returns whether the copy engine loads the keys, in boxes of pages.
bool loads_pages(const MlaDecodeSetup& setup);

// Returns how the cache is named in variants.txt: "pages", "rows", "e4m3" or "fp8_rows".
std::string keys_name(const MlaDecodeSetup& setup);

// Returns the blocks that share a request's keys, 1 or 2.
int32_t row_blocks(const MlaDecodeSetup& setup);

MlaDecodeParams decode_params(const MlaPass& pass, const MlaBlockShape& shape);

}  // namespace fovea::kernels::cuda
