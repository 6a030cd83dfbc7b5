// SPDX-License-Identifier: Apache-2.0
// Emulated warpgroup products against plain loops, for every form of operand.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

// clang-format off: device code needs the names of the first header.
#include "emulation/cuda.h"
#include "kernels/cuda/common/wgmma.cuh"
// clang-format on

namespace fovea::kernels::cuda {
namespace {

constexpr int kRows = 64;
constexpr int kThreads = 128;
constexpr int kDepthBytes = 128;  // bytes of the summed dimension: four instructions
constexpr int kSteps = kDepthBytes / 32;
constexpr int kTileBytes = 64 << 10;

struct Tiles {
  alignas(1024) char a[kTileBytes], b[kTileBytes];
};
thread_local Tiles tiles;

void launch(bool late_products, std::function<void()> body) {
  emulation::Launch launch{.grid = {1, 1, 1}};
  launch.policy.late_products = late_products;
  emulation::Run run(launch, {.threads = kThreads,
                              .blocks_per_sm = 1,
                              .shared_bytes = sizeof(tiles),
                              .shared_limit = sizeof(tiles),
                              .shared = [] { return reinterpret_cast<char*>(&tiles); },
                              .body = std::move(body)});
  ASSERT_TRUE(run.advance(true));
}

// Small integers, as their sums are exact.
float element(int row, int column) { return static_cast<float>((row * 37 + column * 11) % 9 - 4); }

template <Type kType>
void put(char* to, float value) {
  if constexpr (kType == f8e4m3) {
    *to = static_cast<char>(float_to_f8e4m3(value));
  } else {
    const uint16_t bits = from_float<kType>(value);
    std::memcpy(to, &bits, sizeof(bits));
  }
}

// Returns byte `byte` of row `row` in a tile of 128-byte rows with the 128-byte swizzle.
char* in_rows(char* tile, int row, int byte) {
  return tile + row * 128 + ((byte / 16) ^ row % 8) * 16 + byte % 16;
}

enum Form { rows, columns, registers, plain_rows };

// Returns element (outer, k) of an operand. `size` is the extent of the outer dimension.
template <Type kType, Form kForm>
void put_operand(char* tile, int outer, int size, int k, float value) {
  constexpr int kBytes = type_bytes(kType);
  if (kForm == rows) {
    put<kType>(in_rows(tile, outer, k * kBytes), value);
  } else if (kForm == columns) {
    put<kType>(in_rows(tile + outer / 64 * kDepthBytes / kBytes * 128, k, outer % 64 * kBytes),
               value);
  } else {  // blocks of [row][16 bytes], `size` rows each
    put<kType>(tile + k * kBytes / 16 * size * 16 + outer * 16 + k * kBytes % 16, value);
  }
}

template <Type kType, Form kForm>
uint64_t operand(const char* tile, int size, int step) {
  constexpr int kBytes = type_bytes(kType);
  const uint32_t address = shared_address(tile);
  if (kForm == rows) return moved(rows_descriptor(address), step * 32);
  if (kForm == columns) {
    return moved(columns_descriptor(address, kDepthBytes / kBytes * 128), step * 32 / kBytes * 128);
  }
  const auto block = static_cast<uint32_t>(size) * 16;
  return uint64_t{8 * 16 >> 4} << 32 |
         (block >> 4 << 16 | (address + 2 * block * static_cast<uint32_t>(step)) >> 4);
}

template <Type kType, int kColumns, Form kA, Form kB>
void multiply(bool late_products) {
  constexpr int kBytes = type_bytes(kType);
  constexpr int kDepth = kDepthBytes / kBytes;
  std::vector<float> out(kRows * kColumns);
  launch(late_products, [&] {
    if (threadIdx.x == 0) {
      for (int k = 0; k < kDepth; ++k) {
        for (int m = 0; m < kRows; ++m)
          put_operand<kType, kA == registers ? rows : kA>(tiles.a, m, kRows, k, element(m, k));
        for (int n = 0; n < kColumns; ++n)
          put_operand<kType, kB>(tiles.b, n, kColumns, k, element(n, 2 * k));
      }
    }
    __syncthreads();
    const auto thread = static_cast<int>(threadIdx.x);
    const int row = thread / 32 * 16 + thread % 32 / 4;
    // Registers of a: adjacent columns of 32 bits, then row + 8, then the same 16 bytes further.
    uint32_t a[kSteps][4];
    for (int step = 0; step < kSteps; ++step) {
      for (int i = 0; i < 4; ++i) {
        char* bytes = reinterpret_cast<char*>(&a[step][i]);
        for (int j = 0; j < 4; j += kBytes) {
          const int k = (step * 32 + i / 2 * 16 + thread % 4 * 4 + j) / kBytes;
          put<kType>(bytes + j, element(row + i % 2 * 8, k));
        }
      }
    }
    float d[kColumns / 2];
    for (float& one : d) one = 1000;
    products_begin();
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t b = operand<kType, kB>(tiles.b, kColumns, step);
      const bool add = step > 0;
      if constexpr (kA == registers) {
        Product<kColumns>::template run<kType, kB == columns>(d, a[step], b, add);
      } else {
        Product<kColumns>::template run<kType, kB == columns, kA == columns>(
            d, operand<kType, kA>(tiles.a, kRows, step), b, add);
      }
    }
    products_commit();
    products_wait<0>();
    products_landed(d);
    for (int i = 0; i < kColumns / 2; ++i) {
      out[static_cast<size_t>((row + i / 2 % 2 * 8) * kColumns + i / 4 * 8 + thread % 4 * 2 +
                              i % 2)] = d[i];
    }
  });
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kColumns; ++n) {
      float want = 0;
      for (int k = 0; k < kDepth; ++k) want += element(m, k) * element(n, 2 * k);
      ASSERT_EQ(out[static_cast<size_t>(m * kColumns + n)], want)
          << "row " << m << ", column " << n;
    }
  }
}

template <Type kType, Form kA, Form kB>
void multiply_widths() {
  for (const bool late : {false, true}) {
    SCOPED_TRACE(late ? "late" : "early");
    multiply<kType, 8, kA, kB>(late);
    multiply<kType, 48, kA, kB>(late);
    multiply<kType, 128, kA, kB>(late);
    multiply<kType, 256, kA, kB>(late);
  }
}

TEST(Products, OfEveryFormOf16Bits) {
  multiply_widths<bf16, rows, rows>();
  multiply_widths<bf16, rows, columns>();
  multiply_widths<bf16, columns, rows>();
  multiply_widths<bf16, columns, columns>();
  multiply_widths<bf16, registers, rows>();
  multiply_widths<bf16, registers, columns>();
  multiply_widths<f16, rows, columns>();
  multiply_widths<f16, registers, rows>();
}

TEST(Products, OfE4m3) {
  multiply_widths<f8e4m3, rows, rows>();
  multiply_widths<f8e4m3, registers, rows>();
}

TEST(Products, OfOperandsWithoutSwizzle) {
  multiply<bf16, 8, columns, plain_rows>(false);
  multiply<bf16, 8, columns, plain_rows>(true);
}

// Only late products see an operand that is overwritten before the wait, and sums that are read
// before it.
TEST(Products, ReadTheirOperandsWhenTheLaunchSays) {
  for (const bool late : {false, true}) {
    float before = -1, after = -1;
    launch(late, [&] {
      if (threadIdx.x == 0) {
        for (int k = 0; k < 16; ++k) {
          for (int m = 0; m < kRows; ++m) put_operand<bf16, rows>(tiles.a, m, kRows, k, 1);
          for (int n = 0; n < 8; ++n) put_operand<bf16, rows>(tiles.b, n, 8, k, 1);
        }
      }
      __syncthreads();
      float d[4] = {};
      Product<8>::run<bf16, false>(d, operand<bf16, rows>(tiles.a, kRows, 0),
                                   operand<bf16, rows>(tiles.b, 8, 0), true);
      products_commit();
      __syncthreads();
      if (threadIdx.x == 0) before = d[0];
      if (threadIdx.x == 0) std::memset(tiles.b, 0, sizeof(tiles.b));
      products_wait<0>();
      if (threadIdx.x == 0) after = d[0];
    });
    EXPECT_EQ(before, late ? 0 : 16);
    EXPECT_EQ(after, late ? 0 : 16);
  }
}

}  // namespace
}  // namespace fovea::kernels::cuda
