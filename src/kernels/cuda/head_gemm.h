// SPDX-License-Identifier: Apache-2.0
// Products of every head's rows with a matrix of its own: MLA's projections into and out of the
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
  // On sm 90: many rows may go through sm90/head_gemm, which rounds its sums in another way. The
  // bits of a row depend on how many rows there are then, else on that row and the weights alone.
  bool hopper = false;
};

// sm90/head_gemm: products of warpgroups, for many rows.
class HopperHeadGemm {
 public:
  HopperHeadGemm(const HeadGemmSetup& setup, gpu::KernelStore& store);
  static std::vector<gpu::KernelVariant> variants(const HeadGemmSetup& setup);

  // Whether it is faster than portable/head_gemm.
  bool serves(const HeadGemmParams& params) const;
  // As HeadGemm::run.
  void run(const HeadGemmParams& params, Stream stream) const;

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

  // What the constructor takes from the store.
  static std::vector<gpu::KernelVariant> variants(const HeadGemmSetup& setup);

  // Enqueues params, whose row_tiles and groups are set here; legal in a capture. Weights may be
  // read before what is ahead in the stream has ended.
  void run(HeadGemmParams params, Stream stream) const;

 private:
  std::array<Kernel, 3> few_;  // by rows of a tile
  Kernel many_, several_tiles_;
  std::optional<HopperHeadGemm> hopper_;
};

}  // namespace fovea::kernels::cuda
