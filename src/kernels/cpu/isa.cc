// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/isa.h"

#include "fovea/device.h"

namespace fovea::kernels::cpu {

bool has_isa(Isa isa) { return isa == Isa::none || isa <= best_isa(); }

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::none:
      return "none";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::amx:
      return "amx";
  }
  return "?";
}

Isa best_isa() {
  static const Isa best = [] {
    const DeviceInfo device = cpu_device();
    if (device.isa == "amx") return Isa::amx;
    if (device.isa == "avx512") return Isa::avx512;
    if (device.isa == "avx2") return Isa::avx2;
    return Isa::none;
  }();
  return best;
}

}  // namespace fovea::kernels::cpu
