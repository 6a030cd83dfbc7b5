// SPDX-License-Identifier: Apache-2.0
// Multiplies every head's rows with a matrix of its own: MLA's projections into and out of the
// latent space.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "fovea/dtype.h"
#include "gpu/kernel_pack.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/common/head_gemm_params.h"
#include "kernels/cuda/common/hopper_head_gemm_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

enum class WeightOrder : uint8_t { nk, kn };

struct HeadGemmSetup {
  WeightOrder order = WeightOrder::nk;
  DType dtype = DType::bf16;  // bf16 or f16
  int sm = 0;
  int32_t multiprocessors = 0;
  // Set if many rows may go through sm90/head_gemm (sm 90), which rounds its sums differently. The
  // bits of a row then depend on the number of rows; otherwise on that row and the weights only.
  bool hopper = false;
};

// sm90/head_gemm, for many rows.
class HopperHeadGemm {
 public:
  HopperHeadGemm(const HeadGemmSetup& setup, gpu::KernelStore& store);
  static std::vector<gpu::KernelVariant> variants(const HeadGemmSetup& setup);

  // Returns whether this kernel is faster than portable/head_gemm.
  bool serves(const HeadGemmParams& params) const;
  // Enqueues the products, as HeadGemm::run().
  void run(const HeadGemmParams& params, gpu::Launcher launcher) const;

 private:
  WeightOrder order_;
  int32_t multiprocessors_;
  Kernel small_, large_;  // by rows of a tile
  mutable struct { gpu::RepeatedTensorMap x, weight; } maps_;
};

class HeadGemm {
 public:
  HeadGemm() = default;
  // Errors as Kernel's constructor.
  HeadGemm(const HeadGemmSetup& setup, gpu::KernelStore& store);

  // Returns what the constructor takes from the store.
  static std::vector<gpu::KernelVariant> variants(const HeadGemmSetup& setup);

  // Enqueues the products; sets row_tiles and groups. Legal in a capture. Weights may be read
  // before preceding work of the stream has ended.
  void run(HeadGemmParams params, gpu::Launcher launcher) const;

 private:
  std::array<Kernel, 3> few_;  // by rows of a tile
  Kernel many_, several_tiles_;
  std::optional<HopperHeadGemm> hopper_;
};

}  // namespace fovea::kernels::cuda
