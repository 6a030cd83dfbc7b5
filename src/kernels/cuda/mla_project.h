// SPDX-License-Identifier: Apache-2.0
// MLA's up-projection on Hopper: keys and values of every head from rows of latents.
#pragma once

#include <vector>

#include "fovea/dtype.h"
#include "gpu/kernel_pack.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/common/mla_project_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

struct MlaProjectSetup {
  int32_t rank = 0, nope_dim = 0, v_dim = 0;
  DType dtype = DType::bf16;  // bf16 or f16
  int sm = 90;
  int32_t multiprocessors = 0;
  bool gathers = false;  // rows of latents are found by MlaProjectTensors::offsets
};

// Device memory. Tensors without strides are dense; strides count elements.
struct MlaProjectTensors {
  const void* latents = nullptr;     // [rows, rank], or the base of the offsets
  int64_t latents_row_stride = 0;    // without offsets
  const int64_t* offsets = nullptr;  // [rows] elements, multiples of 8; -1: a row of zeros
  // With offsets, or null: [rows, rope_dim] copies of the columns after the rank of each row,
  // except rows of zeros.
  void* rotary = nullptr;
  int32_t rope_dim = 0;
  const void* w_uk = nullptr;  // [heads, nope_dim, rank]
  const void* w_uv = nullptr;  // [heads, v_dim, rank]
  int64_t w_uk_head_stride = 0, w_uv_head_stride = 0;
  void* keys = nullptr;  // [rows, heads, nope_dim]
  int64_t keys_token_stride = 0, keys_head_stride = 0;
  void* values = nullptr;  // [rows, heads, v_dim]
  int64_t values_token_stride = 0, values_head_stride = 0;
  const int32_t* live_rows = nullptr;  // [1]: row tiles of 64 from here on are left untouched
  // Maximum, also of keys and values; a tight one improves the choice of tiles.
  int32_t rows = 0;
  int32_t heads = 0;
};

class MlaProject {
 public:
  // Returns whether there is a kernel for these dims.
  static bool serves(const MlaProjectSetup& setup);
  // Returns what the constructor takes from the store.
  static std::vector<gpu::KernelVariant> variants(const MlaProjectSetup& setup);

  // Error{unsupported} as Kernel's constructor.
  MlaProject(const MlaProjectSetup& setup, gpu::KernelStore& store);

  // Enqueues the products; legal in a capture.
  void run(const MlaProjectTensors& tensors, gpu::Launcher launcher) const;

 private:
  MlaProjectSetup setup_;
  Kernel pairs_, sides_;  // for many row tiles, for few
  mutable struct { gpu::RepeatedTensorMap latents, w_uk, w_uv, keys, values; } maps_;
};

}  // namespace fovea::kernels::cuda
