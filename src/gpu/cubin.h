// SPDX-License-Identifier: Apache-2.0
// Reads compiled kernels without a GPU.
#pragma once

#include <optional>
#include <string_view>

namespace fovea::gpu {

// Returns the bytes of a variable in a cubin (an ELF64 file), or nullopt if the file is no cubin,
// lacks the symbol, or has tables that point outside of it.
std::optional<std::string_view> cubin_variable(std::string_view cubin, std::string_view symbol);

}  // namespace fovea::gpu
