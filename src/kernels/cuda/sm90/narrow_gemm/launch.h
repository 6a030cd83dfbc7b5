// SPDX-License-Identifier: Apache-2.0
// Products of 9 to 128 rows with a matrix on Hopper.
#pragma once

#include <array>
#include <vector>

#include "kernels/cuda/common/narrow_gemm_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

class NarrowProducts {
 public:
  // How blocks divide the weight.
  struct Division {
    int32_t groups = 1;  // times 64 rows of the weight in a tile
    int32_t splits = 1;  // blocks that share a tile's k
  };

  // Loads every variant onto the current GPU; none unless it is a Hopper. Errors as Kernel's
  // constructor.
  NarrowProducts(int sm, gpu::KernelStore& store);

  // Returns true if run() computes such a product.
  bool computes(const SkinnyGemmParams& params) const;
  // Returns true if it does, and is not slower than cuBLASLt and the kernels around it.
  bool serves(const SkinnyGemmParams& params) const;
  // Enqueues the product. It may start before the preceding kernel in the stream has ended; until
  // then it reads the weight only. The order of sums, and so the last bits, depend on the column
  // and on the number of rows, but not on the other rows.
  void run(const SkinnyGemmParams& params, Stream stream) const;

  static constexpr int32_t kMinRows = 9;
  static constexpr int32_t kMaxRows = 128;
  // Products of more rows with fewer weights than these are cuBLASLt's, whose blocks end sooner.
  static constexpr int32_t kMaxRowsOfSmallWeights = 64;
  static constexpr int64_t kMinLargeWeight = 4096 * 4096;
  static constexpr std::array<Division, 8> kDivisions = {
      {{1, 1}, {1, 2}, {1, 3}, {2, 1}, {2, 2}, {2, 3}, {3, 1}, {3, 2}}};
  // Returns the division that run() chooses.
  static Division division_of(const SkinnyGemmParams& params);
  // Enqueues the product with a given division, for measurements.
  void run(const SkinnyGemmParams& params, Division division, Stream stream) const;

 private:
  static constexpr std::array<int32_t, 8> kRowTiles = {16, 32, 48,  64,
                                                       80, 96, 112, 128};  // rows of x in a tile
  static constexpr int32_t kMaxGroups = 3;

  // Returns the index of the smallest tile that has all rows.
  static size_t row_tile_of(int32_t rows);

  std::vector<Kernel> kernels_;  // [row tile][groups - 1]
};

}  // namespace fovea::kernels::cuda
