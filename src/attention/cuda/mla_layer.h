// SPDX-License-Identifier: Apache-2.0
// One layer of a latent cache as the GPU kernels take it, and what they are made of.
#pragma once

#include <vector>

#include "attention/cuda/layer.h"
#include "attention/cuda/mla_kernels.h"
#include "fovea/select_backend.h"
#include "kernels/cuda/head_gemm.h"

namespace fovea {

// The absorbed kernels for such layers, row tiles ascending: the last takes any batch, the others
// are faster where a request's rows fit their tile.
std::vector<kernels::cuda::MlaDecodeSetup> mla_decode_setups(const MlaKernels& kernels,
                                                             const AttentionSpec& spec,
                                                             const KvCacheSpec& cache,
                                                             const DeviceInfo& device);

// The products with W_UK (kn: queries into the latent space) and W_UV (nk).
kernels::cuda::HeadGemmSetup mla_weights_setup(kernels::cuda::WeightOrder order,
                                               const MlaKernels& kernels, const AttentionSpec& spec,
                                               const DeviceInfo& device);

// What a backend over such a cache takes from the store; `heads`: that it may compute at a time
// instead of all.
std::vector<gpu::KernelVariant> mla_variants(const MlaKernels& kernels, const AttentionSpec& spec,
                                             const KvCacheSpec& cache, const DeviceInfo& device,
                                             int32_t heads);

// Writes latent and rotary key of a token as one row. Error{invalid_argument} where a lent pool's
// rows are not 16-byte aligned.
kernels::cuda::KvWriteParams mla_write(const KvLayerView& view, const KvPool& pool,
                                       const AttentionSpec& spec);
// What that writes and, with has_rope, turns.
LayerTensors mla_written(const LayerTensors& tensors, const AttentionSpec& spec, KvLayout layout);

// The cache part of the tensors; the rest is the pass's and the caller's.
kernels::cuda::MlaDecodeTensors mla_cache(const KvLayerView& view, const AttentionSpec& spec);

// Error{invalid_argument} naming what does not fit the spec or is not aligned to 16 bytes.
void validate_mla_layer(const LayerTensors& tensors, const AttentionSpec& spec);

}  // namespace fovea
