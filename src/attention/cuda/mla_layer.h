// SPDX-License-Identifier: Apache-2.0
// A layer of a latent cache in the form that GPU kernels take, and the kernels of such a layer.
#pragma once

#include <vector>

#include "attention/cuda/layer.h"
#include "attention/cuda/mla_kernels.h"
#include "fovea/select_backend.h"
#include "kernels/cuda/head_gemm.h"

namespace fovea {

// Returns the absorbed kernels, by ascending row tile. The last one takes any batch; the others are
// faster if a request's rows fit their tile.
std::vector<kernels::cuda::MlaDecodeSetup> mla_decode_setups(const MlaKernels& kernels,
                                                             const AttentionSpec& spec,
                                                             const KvCacheSpec& cache,
                                                             const DeviceInfo& device);

// Returns the setup of the product with W_UK (kn: queries into the latent space) or W_UV (nk).
kernels::cuda::HeadGemmSetup mla_weights_setup(kernels::cuda::WeightOrder order,
                                               const MlaKernels& kernels, const AttentionSpec& spec,
                                               const DeviceInfo& device);

// Returns the kernels that a backend over such a cache takes from the store. `heads`: heads that it
// may compute at a time instead of all.
std::vector<gpu::KernelVariant> mla_variants(const MlaKernels& kernels, const AttentionSpec& spec,
                                             const KvCacheSpec& cache, const DeviceInfo& device,
                                             int32_t heads);

// Returns the parameters that write latent and rotary key of a token as one row. Throws
// Error{invalid_argument} if a lent pool's rows are not 16-byte aligned.
kernels::cuda::KvWriteParams mla_write(const KvLayerView& view, const KvPool& pool,
                                       const AttentionSpec& spec);
// Returns the tensors that this kernel stores and, with has_rope, rotates.
LayerTensors mla_written(const LayerTensors& tensors, const AttentionSpec& spec, KvLayout layout);

// Returns the tensors with the cache's fields filled in.
kernels::cuda::MlaDecodeTensors mla_cache(const KvLayerView& view, const AttentionSpec& spec);

// Throws Error{invalid_argument} that names a tensor that does not fit the spec or is not aligned
// to 16 bytes.
void validate_mla_layer(const LayerTensors& tensors, const AttentionSpec& spec);

}  // namespace fovea
