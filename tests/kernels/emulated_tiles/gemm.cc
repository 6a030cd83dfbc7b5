// SPDX-License-Identifier: Apache-2.0
// The kernel of AMX over tile registers in memory, for processors without them. It takes the place
// of the library's in the program that it is linked to.
#include "kernels/cpu/amx/gemm.h"

#include <cstring>

#include "kernels/cpu/amx/gemm_tiles.h"

namespace fovea::kernels::cpu::amx {
namespace {

constexpr int kTiles = 8, kRows = 16, kMaxRowBytes = 64;

struct EmulatedTiles {
  static void configure(int words) {
    std::memset(registers, 0xff, sizeof(registers));  // NaN
    for (int tile = 0; tile < kTiles; ++tile) {
      row_bytes[tile] = tile == 4 || tile == 5 ? kMaxRowBytes : 4 * words;
    }
  }
  static void release() { configure(0); }
  template <int tile>
  static void zero() {
    std::memset(registers[tile], 0, sizeof(registers[tile]));
  }
  template <int tile>
  static void load(const void* from, int64_t stride) {
    for (int row = 0; row < kRows; ++row) {
      std::memcpy(registers[tile][row], static_cast<const char*>(from) + row * stride,
                  static_cast<size_t>(row_bytes[tile]));
    }
  }
  template <int tile>
  static void store(float* to, int64_t stride) {
    for (int row = 0; row < kRows; ++row) {
      std::memcpy(reinterpret_cast<char*>(to) + row * stride, registers[tile][row],
                  static_cast<size_t>(row_bytes[tile]));
    }
  }
  template <int to, int a, int b>
  static void add_product() {
    for (int i = 0; i < kRows; ++i) {
      for (int k = 0; k < kRows; ++k) {
        for (int j = 0; j < row_bytes[to] / 4; ++j) {
          float sum = 0;
          std::memcpy(&sum, registers[to][i] + 4 * j, sizeof(sum));
          sum += value(a, i, 2 * k) * value(b, k, 2 * j);
          sum += value(a, i, 2 * k + 1) * value(b, k, 2 * j + 1);
          std::memcpy(registers[to][i] + 4 * j, &sum, sizeof(sum));
        }
      }
    }
  }

 private:
  static float value(int tile, int row, int column) {
    uint16_t bits = 0;
    std::memcpy(&bits, registers[tile][row] + 2 * column, sizeof(bits));
    const uint32_t wide = uint32_t{bits} << 16;
    float result = 0;
    std::memcpy(&result, &wide, sizeof(result));
    return result;
  }

  static thread_local unsigned char registers[kTiles][kRows][kMaxRowBytes];
  static thread_local int row_bytes[kTiles];
};

thread_local unsigned char EmulatedTiles::registers[kTiles][kRows][kMaxRowBytes];
thread_local int EmulatedTiles::row_bytes[kTiles];

}  // namespace

void gemm_nk(const GemmParams& params, const GemmRange& range) {
  multiply<EmulatedTiles>(params, range);
}

}  // namespace fovea::kernels::cpu::amx
