// SPDX-License-Identifier: Apache-2.0
// The tile registers of AMX (Intel SDM, volume 1, chapter 18): eight of 16 rows of up to 64 bytes.
// The compilers' intrinsics take their numbers as literals only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace fovea::kernels::cpu::amx {

// Each thread configures the registers before it uses them. Releasing them spares the system from
// saving 8 KB at each change of threads.
struct Tiles {
  // Tiles 4 and 5 have 16 words a row, the others have `words`.
  static void configure(int words) {
    const auto bytes = static_cast<uint16_t>(4 * words);
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16];
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const all{.row_bytes = {bytes, bytes, bytes, bytes, 64, 64, bytes, bytes}};
    _tile_loadconfig(&all);
  }
  static void release() { _tile_release(); }
  template <int tile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
  }
  // Loads 16 rows that are `stride` bytes apart.
  template <int tile>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
  }
  template <int tile>
  static void store(float* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
  }
  // to[i][j] += sum of a[i][2k] b[k][2j] + a[i][2k + 1] b[k][2j + 1] over k: bf16 in, f32 out.
  template <int to, int a, int b>
  static void add_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(to), "i"(a), "i"(b));
  }
};

}  // namespace fovea::kernels::cpu::amx
