// SPDX-License-Identifier: Apache-2.0
// The instruction sets that the sources of this folder are compiled for. A header here declares its
// functions once per set, a host file picks:
//
//   #define FOVEA_DECLARE(isa) namespace isa { void f(int); }
//   FOVEA_FOR_EACH_ISA(FOVEA_DECLARE)
//   ...
//   FOVEA_FOR_ISA(best_isa(), f)(42);
#pragma once

#include "kernels/cpu/isa.h"

#if defined(__x86_64__)
#define FOVEA_FOR_EACH_ISA(declare) declare(baseline) declare(avx2) declare(avx512)
#define FOVEA_FOR_ISA(isa, function)                              \
  ((isa) >= ::fovea::kernels::cpu::Isa::avx512 ? avx512::function \
   : (isa) == ::fovea::kernels::cpu::Isa::avx2 ? avx2::function   \
                                               : baseline::function)
#else
#define FOVEA_FOR_EACH_ISA(declare) declare(baseline)
#define FOVEA_FOR_ISA(isa, function) ((void)(isa), baseline::function)
#endif
