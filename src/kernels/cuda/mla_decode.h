// SPDX-License-Identifier: Apache-2.0
// Absorbed MLA decode on a GPU: queries of latent and RoPE columns against a cache of such rows,
// whose latent columns are the values as well. Lengths stay on the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "fovea/batch.h"
#include "fovea/dtype.h"
#include "gpu/kernel_pack.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/kernel.h"
#include "kernels/cuda/portable/mla_merge/launch.h"
#include "kernels/cuda/portable/mla_plan/launch.h"
#include "kernels/cuda/sm90/choose.h"

namespace fovea::kernels::cuda {

// Contents of a row of the cache. Products of fp8 caches are computed in f16, with queries up to
// 65504 for e4m3, and up to 2^20 with keys up to 4094 for fp8_rows. Before sm_89 a stored NaN
// counts as 480.
enum class MlaCache : uint8_t {
  as_queries,  // rank + rope elements of the queries' dtype
  e4m3,        // rank + rope f8e4m3 elements, times MlaDecodeTensors::cache_scale
  fp8_rows,    // KvLayout::mla_fp8_rows; rank 512, rope 64
};

struct MlaFamily;
const MlaFamily& hopper_mla();    // sm90/mla_decode, mla_decode_16 and mla_decode_fp8_narrow
const MlaFamily& portable_mla();  // portable/mla_decode: sm_80 and later

struct MlaDecodeSetup {
  const MlaFamily* family = &hopper_mla();
  int32_t q_heads = 128;
  int32_t rank = 512;         // latent columns
  int32_t rope = 64;          // RoPE columns
  DType dtype = DType::bf16;  // dtype of queries and output: bf16 or f16
  MlaCache cache = MlaCache::as_queries;
  bool scale_per_token = false;  // e4m3 caches; portable/mla_decode only
  bool windowed = false;         // masks may have a window; portable/mla_decode only
  int32_t page_size = 64;
  int32_t max_q_len = 1;  // maximum of a typical batch; with q_heads it decides the row tile
  // The bits of a row do not depend on the rest of the batch. Batches of few long requests then use
  // few SMs.
  bool batch_invariant = false;
  // Cycles that a block of MlaJoins::blocks waits for the parts of other blocks. 0: the block that
  // stores the last part joins all rows.
  int32_t join_patience = 1 << 15;
  int sm = 90;
  int32_t multiprocessors = 0;
};

// Device memory; strides in elements (fp8_rows: bytes), rows of a head contiguous; rows of 16-bit
// elements and of fp8 caches begin at multiples of 16 bytes.
struct MlaDecodeTensors {
  MlaQueries q_latent{};        // [tokens, q_heads, rank]
  MlaQueries q_rope{};          // [tokens, q_heads, rope]
  int64_t tokens = 0;           // rows of q
  const void* cache = nullptr;  // [pages, page_size, rank + rope]
  int64_t pages = 0, page_stride = 0, token_stride = 0;
  // e4m3 only: [1], with scale_per_token [pages * page_size]; null: 1
  const float* cache_scale = nullptr;
  MlaPageTable page_table{};
  MlaOutput out{};  // [tokens, q_heads, rank]
  float scale = 1;
};

// Tensor maps, encoded once per layer.
struct MlaDecodeMaps {
  gpu::RepeatedTensorMap cache, cache_rope, q_latent, q_rope;
};

// One layer of a planned batch.
struct MlaPass {
  const MlaDecodeSetup& setup;
  const MlaDecodeTensors& tensors;
  const BatchParams& batch;
  const MlaWorkList& work;
  bool list_complete;  // a layer of the plan has been enqueued before
  bool keys_complete;  // list_complete and ExpectedKeys::prefix_written
  MlaDecodeMaps& maps;
};

// The attention kernels between portable/mla_plan and portable/mla_merge. Their folder defines it.
struct MlaFamily {
  // Throws Error{invalid_argument} naming what the kernels do not support.
  void (*check)(const MlaDecodeSetup& setup) = nullptr;
  // Packed (token, head) rows of a work item, 16, 32, 64 or 128.
  int32_t (*row_tile)(const MlaDecodeSetup& setup) = nullptr;
  int32_t (*workers)(const MlaDecodeSetup& setup) = nullptr;
  // Returns the dtype of MlaWorkList::partial_out: f32 or f16.
  DType (*parts)(const MlaDecodeSetup& setup) = nullptr;
  gpu::KernelVariant (*variant)(const MlaDecodeSetup& setup, MlaJoins joins) = nullptr;
  // Returns whether there is such a variant; `blocks` replaces `merge`. Null: only `merge`.
  bool (*joins)(const MlaDecodeSetup& setup, MlaJoins joins) = nullptr;
  void (*attend)(const MlaPass& pass, const Kernel& kernel, gpu::Launcher launcher) = nullptr;
};

class MlaDecode {
 public:
  // Throws Error{unsupported} as Kernel's constructor, Error{invalid_argument} naming what the
  // kernels do not support.
  MlaDecode(const MlaDecodeSetup& setup, gpu::KernelStore& store);

  // Returns the packed (token, head) rows of a request that are computed together: 16, 32, 64 or
  // 128. Keys of requests with more rows are read several times.
  static int32_t row_tile(const MlaDecodeSetup& setup);
  int32_t row_tile() const { return row_tile(setup_); }
  // Returns what the constructor takes from the store.
  static std::vector<gpu::KernelVariant> variants(const MlaDecodeSetup& setup);
  // Returns an upper bound over every batch within the setup and the limits. Uses no device.
  static size_t workspace_bytes(const MlaDecodeSetup& setup, const BatchLimits& limits);
  // Takes 64-byte aligned device memory of workspace_bytes. Its contents are undefined before
  // plan() and must not change until the last attend().
  void reserve(const BatchLimits& limits, std::byte* workspace);

  // Adds the plan of a pass, from lengths on the device to the work of all layers. Masks:
  // causal, tree and, with MlaDecodeSetup::windowed, window, with positions of at most 64 new
  // tokens a request. skip: [requests] on the device, 1: the request's rows are left untouched; or
  // null.
  void plan(const PlanRequest& request, PlanQueue& plans, const uint8_t* skip = nullptr);
  // Enqueues one layer of the planned batch. Both calls are legal in a capture.
  void attend(const MlaDecodeTensors& tensors, gpu::Launcher launcher) const;

 private:
  MlaDecodeSetup setup_;
  MlaPlan plan_, plan_clusters_;
  Kernel decode_, decode_pairs_, decode_clusters_;
  MlaMergeKernel merge_;
  std::vector<hopper::ClusterCapacity> clusters_;  // by size
  MlaWorkList reserved_{};
  BatchLimits limits_;
  // State of the planned batch.
  MlaWorkList work_{};
  MlaJoins joins_ = MlaJoins::merge;
  BatchParams batch_{};
  bool prefix_written_ = false;
  mutable bool list_complete_ = false;  // a layer of the planned batch has been enqueued
  mutable MlaDecodeMaps maps_;
};

}  // namespace fovea::kernels::cuda
