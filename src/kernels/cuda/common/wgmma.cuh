// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup on the tensor cores (wgmma, sm_90a): d[64, kColumns] = a * b + d with f32
// accumulators, a from shared memory or registers, b from shared memory. They are asynchronous:
// nothing may touch d, a or b between products_begin() and the wait.
//
// Thread t of the warpgroup holds rows r = t / 32 * 16 + t % 32 / 4 and r + 8; d[4 * j + i] is row
// r (i < 2) or r + 8, column 8 * j + t % 4 * 2 + i % 2. As a operand of 16 columns: {row r, r + 8}
// x {columns 2 * (t % 4) + {0, 1}, the same + 8}, two packed values a register, in the order of d.
#pragma once

#include "kernels/cuda/common/operand_descriptor.cuh"

namespace fovea::kernels::cuda {

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Called after the wait: keeps the compiler from moving reads of d before it.
template <int kCount>
__device__ __forceinline__ void products_landed(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Issues one instruction over kColumns columns of b and 32 bytes of the summed dimension.
// columns_descriptor() describes b if kColumnsOperand, and a if kColumnsA. Without `add`, d = a *
// b.
template <int kColumns>
struct Product;

// Operand lists of 8 accumulators each.
#define FOVEA_R4 "%0, %1, %2, %3"
#define FOVEA_R8 \
  FOVEA_R4       \
  ", "           \
  "%4, %5, %6, %7"
#define FOVEA_R16 \
  FOVEA_R8        \
  ", "            \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define FOVEA_R24 \
  FOVEA_R16       \
  ", "            \
  "%16, %17, %18, %19, %20, %21, %22, %23"
#define FOVEA_R32 \
  FOVEA_R24       \
  ", "            \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define FOVEA_R40 \
  FOVEA_R32       \
  ", "            \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define FOVEA_R48 \
  FOVEA_R40       \
  ", "            \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define FOVEA_R56 \
  FOVEA_R48       \
  ", "            \
  "%48, %49, %50, %51, %52, %53, %54, %55"
#define FOVEA_R64 \
  FOVEA_R56       \
  ", "            \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define FOVEA_R72 \
  FOVEA_R64       \
  ", "            \
  "%64, %65, %66, %67, %68, %69, %70, %71"
#define FOVEA_R80 \
  FOVEA_R72       \
  ", "            \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define FOVEA_R88 \
  FOVEA_R80       \
  ", "            \
  "%80, %81, %82, %83, %84, %85, %86, %87"
#define FOVEA_R96 \
  FOVEA_R88       \
  ", "            \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define FOVEA_R104 \
  FOVEA_R96        \
  ", "             \
  "%96, %97, %98, %99, %100, %101, %102, %103"
#define FOVEA_R112 \
  FOVEA_R104       \
  ", "             \
  "%104, %105, %106, %107, %108, %109, %110, %111"
#define FOVEA_R120 \
  FOVEA_R112       \
  ", "             \
  "%112, %113, %114, %115, %116, %117, %118, %119"
#define FOVEA_R128 \
  FOVEA_R120       \
  ", "             \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define FOVEA_D8(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FOVEA_D_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define FOVEA_D_8 FOVEA_D8(0)
#define FOVEA_D_16 FOVEA_D_8, FOVEA_D8(8)
#define FOVEA_D_24 FOVEA_D_16, FOVEA_D8(16)
#define FOVEA_D_32 FOVEA_D_24, FOVEA_D8(24)
#define FOVEA_D_40 FOVEA_D_32, FOVEA_D8(32)
#define FOVEA_D_48 FOVEA_D_40, FOVEA_D8(40)
#define FOVEA_D_56 FOVEA_D_48, FOVEA_D8(48)
#define FOVEA_D_64 FOVEA_D_56, FOVEA_D8(56)
#define FOVEA_D_72 FOVEA_D_64, FOVEA_D8(64)
#define FOVEA_D_80 FOVEA_D_72, FOVEA_D8(72)
#define FOVEA_D_88 FOVEA_D_80, FOVEA_D8(80)
#define FOVEA_D_96 FOVEA_D_88, FOVEA_D8(88)
#define FOVEA_D_104 FOVEA_D_96, FOVEA_D8(96)
#define FOVEA_D_112 FOVEA_D_104, FOVEA_D8(104)
#define FOVEA_D_120 FOVEA_D_112, FOVEA_D8(112)
#define FOVEA_D_128 FOVEA_D_120, FOVEA_D8(120)

// o0 to o5 are the numbers of the operands that follow the accumulators.
#define FOVEA_PRODUCT_SHARED(columns, count, types, o0, o1, o2, o3, o4)                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2                                          \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." types " {" FOVEA_R##count \
               "}, %" #o0 ", %" #o1 ", p, 1, 1, %" #o4 ", %" #o3 ";\n}\n"                        \
               : FOVEA_D_##count                                                                 \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kColumnsOperand ? 1 : 0),       \
                 "n"(kColumnsA ? 1 : 0))
#define FOVEA_PRODUCT_REGISTERS(columns, count, types, o0, o1, o2, o3, o4, o5, o6)               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o5                                          \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." types " {" FOVEA_R##count \
               "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1, %" #o6 ";\n}\n"  \
               : FOVEA_D_##count                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), \
                 "n"(kColumnsOperand ? 1 : 0))
// Multiplies e4m3 operands over 32 elements of the summed dimension, along the rows of both.
#define FOVEA_PRODUCT_E4M3_SHARED(columns, count, o0, o1, o2)                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2                                          \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {" FOVEA_R##count \
               "}, %" #o0 ", %" #o1 ", p, 1, 1;\n}\n"                                            \
               : FOVEA_D_##count                                                                 \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define FOVEA_PRODUCT_E4M3_REGISTERS(columns, count, o0, o1, o2, o3, o4, o5)                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o5                                          \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {" FOVEA_R##count \
               "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1;\n}\n"            \
               : FOVEA_D_##count                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))
#define FOVEA_PRODUCT(columns, count, o0, o1, o2, o3, o4, o5, o6)                            \
  template <>                                                                                \
  struct Product<columns> {                                                                  \
    template <Type kType, bool kColumnsOperand, bool kColumnsA = false>                      \
    __device__ __forceinline__ static void run(float* d, uint64_t a, uint64_t b, bool add) { \
      if constexpr (kType == bf16) {                                                         \
        FOVEA_PRODUCT_SHARED(columns, count, "bf16.bf16", o0, o1, o2, o3, o4);               \
      } else if constexpr (kType == f8e4m3) {                                                \
        static_assert(!kColumnsOperand);                                                     \
        FOVEA_PRODUCT_E4M3_SHARED(columns, count, o0, o1, o2);                               \
      } else {                                                                               \
        FOVEA_PRODUCT_SHARED(columns, count, "f16.f16", o0, o1, o2, o3, o4);                 \
      }                                                                                      \
    }                                                                                        \
    template <Type kType, bool kColumnsOperand>                                              \
    __device__ __forceinline__ static void run(float* d, const uint32_t* a, uint64_t b,      \
                                               bool add) {                                   \
      if constexpr (kType == bf16) {                                                         \
        FOVEA_PRODUCT_REGISTERS(columns, count, "bf16.bf16", o0, o1, o2, o3, o4, o5, o6);    \
      } else if constexpr (kType == f8e4m3) {                                                \
        static_assert(!kColumnsOperand);                                                     \
        FOVEA_PRODUCT_E4M3_REGISTERS(columns, count, o0, o1, o2, o3, o4, o5);                \
      } else {                                                                               \
        FOVEA_PRODUCT_REGISTERS(columns, count, "f16.f16", o0, o1, o2, o3, o4, o5, o6);      \
      }                                                                                      \
    }                                                                                        \
  };

FOVEA_PRODUCT(8, 4, 4, 5, 6, 7, 8, 9, 10)
FOVEA_PRODUCT(16, 8, 8, 9, 10, 11, 12, 13, 14)
FOVEA_PRODUCT(32, 16, 16, 17, 18, 19, 20, 21, 22)
FOVEA_PRODUCT(48, 24, 24, 25, 26, 27, 28, 29, 30)
FOVEA_PRODUCT(64, 32, 32, 33, 34, 35, 36, 37, 38)
FOVEA_PRODUCT(80, 40, 40, 41, 42, 43, 44, 45, 46)
FOVEA_PRODUCT(96, 48, 48, 49, 50, 51, 52, 53, 54)
FOVEA_PRODUCT(112, 56, 56, 57, 58, 59, 60, 61, 62)
FOVEA_PRODUCT(128, 64, 64, 65, 66, 67, 68, 69, 70)
FOVEA_PRODUCT(144, 72, 72, 73, 74, 75, 76, 77, 78)
FOVEA_PRODUCT(160, 80, 80, 81, 82, 83, 84, 85, 86)
FOVEA_PRODUCT(176, 88, 88, 89, 90, 91, 92, 93, 94)
FOVEA_PRODUCT(192, 96, 96, 97, 98, 99, 100, 101, 102)
FOVEA_PRODUCT(208, 104, 104, 105, 106, 107, 108, 109, 110)
FOVEA_PRODUCT(224, 112, 112, 113, 114, 115, 116, 117, 118)
FOVEA_PRODUCT(240, 120, 120, 121, 122, 123, 124, 125, 126)
FOVEA_PRODUCT(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef FOVEA_PRODUCT
#undef FOVEA_PRODUCT_E4M3_SHARED
#undef FOVEA_PRODUCT_E4M3_REGISTERS
#undef FOVEA_PRODUCT_SHARED
#undef FOVEA_PRODUCT_REGISTERS
#undef FOVEA_D8

}  // namespace fovea::kernels::cuda
