// SPDX-License-Identifier: Apache-2.0
// What the CPU kernels can be made to run as on this processor.
#pragma once

#include <vector>

#include "kernels/cpu/isa.h"

namespace fovea::test {

// The baseline, and every instruction set there is.
inline std::vector<kernels::cpu::Isa> isas() {
  using kernels::cpu::Isa;
  std::vector<Isa> list = {Isa::none};
  for (const Isa isa : {Isa::avx2, Isa::avx512}) {
    if (kernels::cpu::has_isa(isa)) list.push_back(isa);
  }
  return list;
}

}  // namespace fovea::test
