// SPDX-License-Identifier: Apache-2.0
// The instruction sets in which the CPU kernels can run on this processor.
#pragma once

#include <vector>

#include "kernels/cpu/isa.h"

namespace fovea::test {

// Returns the baseline and every available instruction set.
inline std::vector<kernels::cpu::Isa> isas() {
  using kernels::cpu::Isa;
  std::vector<Isa> list = {Isa::none};
  for (const Isa isa : {Isa::avx2, Isa::avx512}) {
    if (kernels::cpu::has_isa(isa)) list.push_back(isa);
  }
  return list;
}

}  // namespace fovea::test
