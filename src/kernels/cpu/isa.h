// SPDX-License-Identifier: Apache-2.0
// The instruction sets that kernels are compiled for.
#pragma once

#include <cstdint>
#include <string_view>

namespace fovea::kernels::cpu {

enum class Isa : uint8_t { none, avx2, avx512 };

// Returns the widest instruction set that this build has and this processor runs; none if the `cpu`
// backend is unavailable.
Isa best_isa();
bool has_isa(Isa isa);
std::string_view isa_name(Isa isa);

}  // namespace fovea::kernels::cpu
