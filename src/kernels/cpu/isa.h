// SPDX-License-Identifier: Apache-2.0
// Which of the compiled instruction sets to run.
#pragma once

#include <cstdint>
#include <string_view>

namespace fovea::kernels::cpu {

enum class Isa : uint8_t { none, avx2, avx512 };

// The widest one this build has and this processor runs; none where `cpu` is unavailable.
Isa best_isa();
bool has_isa(Isa isa);
std::string_view isa_name(Isa isa);

}  // namespace fovea::kernels::cpu
