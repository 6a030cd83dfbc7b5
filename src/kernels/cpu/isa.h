// SPDX-License-Identifier: Apache-2.0
// The instruction sets that kernels are compiled for.
#pragma once

#include <cstdint>
#include <string_view>

namespace fovea::kernels::cpu {

// Each one includes those before it. amx: AVX-512, and products of bf16 by tiles (AMX-BF16).
enum class Isa : uint8_t { none, avx2, avx512, amx };

// Returns the widest instruction set that this build has and this processor runs; none if the `cpu`
// backend is unavailable.
Isa best_isa();
bool has_isa(Isa isa);
std::string_view isa_name(Isa isa);

}  // namespace fovea::kernels::cpu
