// SPDX-License-Identifier: Apache-2.0
// Reading compiled kernels without a GPU.
#pragma once

#include <optional>
#include <string_view>

namespace fovea::gpu {

// The bytes a cubin (an ELF64 file) holds for one of its variables; nullopt when it is no such
// file, has no such symbol, or its tables point outside of it.
std::optional<std::string_view> cubin_variable(std::string_view cubin, std::string_view symbol);

}  // namespace fovea::gpu
