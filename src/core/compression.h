// SPDX-License-Identifier: Apache-2.0
// Compression by zstd.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fovea {

// Compresses into one frame, which also stores the size and a checksum.
std::string compress(std::string_view bytes);

// Decompresses one frame of `size` bytes and allocates no more than that. Throws
// Error{corrupt_file} that names `what` and the damage.
std::string decompress(std::string_view frame, size_t size, std::string_view what);

}  // namespace fovea
