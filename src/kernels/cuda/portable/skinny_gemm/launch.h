// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with a matrix.
#pragma once

#include <array>

#include "kernels/cuda/common/skinny_gemm_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

class SkinnyProducts {
 public:
  // Loads every tile onto the current GPU. Errors as Kernel's constructor.
  SkinnyProducts(int sm, gpu::KernelStore& store);

  // Returns true if run() computes such a product.
  static bool serves(const SkinnyGemmParams& params);
  // Enqueues the product. It may start before the preceding kernel in the stream has ended; until
  // then it reads the weight only. The order of sums, and so the last bits, depend on the column
  // and on the tile that the weight chooses, not on the number of rows.
  void run(const SkinnyGemmParams& params, Stream stream) const;

  struct Tile {
    const char* columns;
    const char* rows;
  };
  static constexpr std::array<Tile, 2> kTiles = {{{"16", "8"}, {"32", "8"}}};
  static constexpr int32_t kMaxRows = 8;
  // Returns the tile that run() chooses.
  static size_t tile_of(const SkinnyGemmParams& params);
  // Enqueues the product with a given tile, for measurements.
  void run(const SkinnyGemmParams& params, size_t tile, Stream stream) const;

 private:
  std::array<Kernel, kTiles.size()> kernels_;
};

}  // namespace fovea::kernels::cuda
