// SPDX-License-Identifier: Apache-2.0
// A layer of a pool in the form that GPU kernels take, prepared when a backend is built.
#pragma once

#include "fovea/attention_backend.h"
#include "gpu/kernel_pack.h"
#include "kernels/cuda/common/attention_params.h"

namespace fovea {

struct CudaLayer {
  kernels::cuda::KeyParams keys{};       // without the page table
  kernels::cuda::KvWriteParams write{};  // without the pass's tensors
};

// Throws Error{invalid_argument} if a lent pool's rows are not 16-byte aligned.
CudaLayer cuda_layer(const KvLayerView& view, const KvPool& pool);

// Throws Error{invalid_argument} if a lent pool's states are not 16-byte aligned.
void check_state_alignment(const StateLayerView& view, DType dtype, int32_t layer);

// Returns the keys of packed scopes: the layer's own k and v.
kernels::cuda::KeyParams packed_keys(const LayerTensors& tensors, const BatchView& batch);

// Throws Error{invalid_argument} that names a tensor whose address or strides are not multiples of
// 16 bytes.
void validate_alignment(const LayerTensors& tensors);

// Returns the kernel that stores new k and v, the same for every family.
gpu::KernelVariant kv_write_variant(const AttentionSpec& spec, const KvCacheSpec& cache, int sm);

}  // namespace fovea
