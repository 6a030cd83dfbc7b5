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
  for (const Isa isa : {Isa::avx2, Isa::avx512, Isa::amx}) {
    if (kernels::cpu::has_isa(isa)) list.push_back(isa);
  }
#ifdef FOVEA_EMULATED_TILES
  if (list.back() == Isa::avx512) list.push_back(Isa::amx);
#endif
  return list;
}

}  // namespace fovea::test
