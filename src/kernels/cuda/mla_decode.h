// SPDX-License-Identifier: Apache-2.0
// Absorbed MLA decode on a GPU: queries of latent and RoPE columns against a cache of such rows,
// whose latent columns are the values as well. Device lengths in, nothing on the host after the
// launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "fovea/batch.h"
#include "fovea/dtype.h"
#include "gpu/kernel_pack.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/common/mla_params.h"
#include "kernels/cuda/common/plan_launch.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

// What a row of the cache holds.
enum class MlaCache : uint8_t {
  as_queries,  // rank + rope elements of the queries' dtype
  e4m3,        // rank + rope f8e4m3 elements, to be multiplied by MlaDecodeTensors::cache_scale
  fp8_rows,    // KvLayout::mla_fp8_rows; rank 512, rope 64
               // fp8_rows and, for sm90/mla_decode, e4m3: bf16 queries. Both are computed in f16:
               // queries up to 65504 with e4m3, up to 2^20 with keys up to 4094 with fp8_rows.
               // Before sm_89 a stored NaN counts as 480.
};

// Rows of a block where blocks join parts in clusters: it sends the others 16 KB of values, which
// takes 0.5 us; those of 64 rows took 3, no less than a merge (2026-11-22).
constexpr int32_t kMlaClusterRows = 16;

struct MlaFamily;
const MlaFamily& hopper_mla();    // sm90/mla_decode
const MlaFamily& portable_mla();  // portable/mla_decode: sm_80 and later

struct MlaDecodeSetup {
  const MlaFamily* family = &hopper_mla();
  int32_t q_heads = 128;
  int32_t rank = 512;         // latent columns
  int32_t rope = 64;          // RoPE columns
  DType dtype = DType::bf16;  // of queries and output: bf16 or f16
  MlaCache cache = MlaCache::as_queries;
  bool scale_per_token = false;  // of an e4m3 cache; portable/mla_decode only
  bool windowed = false;         // masks may have a window; portable/mla_decode only
  int32_t page_size = 64;
  int32_t max_q_len = 1;  // of most batches; with q_heads it decides the row tile
  // The bits of a row do not depend on the batch it is in; few long requests then keep few SMs
  // busy.
  bool batch_invariant = false;
  // Cycles for which a block of MlaJoins::blocks waits for others' parts; 0: the last one joins
  // all.
  int32_t join_patience = 1 << 15;
  int sm = 90;
  int32_t multiprocessors = 0;
};

// Device memory; strides in elements (fp8_rows: bytes), rows of a head contiguous; rows of 16-bit
// elements and of fp8 caches begin at multiples of 16 bytes.
struct MlaDecodeTensors {
  const void* q_latent = nullptr;  // [tokens, q_heads, rank]
  const void* q_rope = nullptr;    // [tokens, q_heads, rope]
  int64_t q_latent_token_stride = 0, q_latent_head_stride = 0;
  int64_t q_rope_token_stride = 0, q_rope_head_stride = 0;
  int64_t tokens = 0;           // rows of q that may be read
  const void* cache = nullptr;  // [pages, page_size, rank + rope]
  int64_t pages = 0, page_stride = 0, token_stride = 0;
  // [1], with scale_per_token [pages * page_size], or null: 1; e4m3 only
  const float* cache_scale = nullptr;
  const int32_t* page_table = nullptr;  // [requests, page_table_stride]
  int64_t page_table_stride = 0;
  void* out = nullptr;  // [tokens, q_heads, rank]
  int64_t out_token_stride = 0, out_head_stride = 0;
  float* lse = nullptr;  // [tokens, q_heads] or null; natural log
  float scale = 1;
};

// What a family encodes once per layer.
struct MlaDecodeMaps {
  gpu::RepeatedTensorMap cache, cache_rope, q_latent, q_rope;
};

// One layer of a planned batch.
struct MlaPass {
  const MlaDecodeSetup& setup;
  const MlaDecodeTensors& tensors;
  const BatchParams& batch;
  const MlaWorkList& work;
  bool list_settled;  // not the first layer of the plan
  bool keys_settled;  // and MlaBounds::prefix_settled
  MlaDecodeMaps& maps;
};

// What the host knows of a batch, so that a captured pass keeps it. Lengths choose kernels; 0: what
// the limits say.
struct MlaBounds {
  int32_t max_q_len = 0, max_kv_len = 0;
  bool prefix_settled = false;  // BatchHints::prefix_written
};

// An attention kernel between portable/mla_plan and portable/mla_merge; its folder defines it.
struct MlaFamily {
  std::string_view folder;  // below kernels/cuda
  // Error{invalid_argument} naming what the kernels do not take.
  void (*check)(const MlaDecodeSetup& setup) = nullptr;
  // Packed (token, head) rows of a work item, 16, 32, 64 or 128.
  int32_t (*row_tile)(const MlaDecodeSetup& setup) = nullptr;
  int32_t (*workers)(const MlaDecodeSetup& setup) = nullptr;
  DType (*parts)(const MlaDecodeSetup& setup) = nullptr;  // of MlaWorkList::partial_out: f32, f16
  VariantValues (*values)(const MlaDecodeSetup& setup, MlaJoins joins) = nullptr;
  // Whether there is such a variant, blocks' instead of merge's; null: only merge.
  bool (*joins)(const MlaDecodeSetup& setup, MlaJoins joins) = nullptr;
  void (*attend)(const MlaPass& pass, const Kernel& kernel, Stream stream) = nullptr;
};

class MlaDecode {
 public:
  // Error{unsupported} as Kernel's constructor; Error{invalid_argument} naming what the kernels do
  // not take.
  MlaDecode(const MlaDecodeSetup& setup, gpu::KernelStore& store);

  // Packed (token, head) rows of a request that are computed together, 16, 32, 64 or 128: requests
  // with more read their keys several times.
  static int32_t row_tile(const MlaDecodeSetup& setup);
  int32_t row_tile() const { return row_tile(setup_); }
  // What the constructor takes from the store.
  static std::vector<gpu::KernelVariant> variants(const MlaDecodeSetup& setup);
  // Exact upper bound over every batch within the setup and the limits. Touches no device.
  static size_t workspace_bytes(const MlaDecodeSetup& setup, const BatchLimits& limits);
  // 64-byte aligned device memory of workspace_bytes, the kernel's from a plan() to the last
  // decode().
  void reserve(const BatchLimits& limits, std::byte* workspace);

  // Once per pass: from lengths on the device to the work of all layers. Masks: causal, tree and,
  // where the setup says so, window, with positions of at most 64 new tokens a request.
  // skip: [requests] on the device, 1: a request without work, whose rows stay untouched; or null.
  void plan(const BatchParams& batch, const MlaBounds& bounds, const PlanCompany& company,
            Stream stream, const uint8_t* skip = nullptr);
  // Once per layer, of the planned batch. Both are legal in a capture.
  void decode(const MlaDecodeTensors& tensors, Stream stream) const;

 private:
  void choose_joins(const BatchParams& batch, const MlaBounds& bounds);

  MlaDecodeSetup setup_;
  Kernel plan_, decode_, merge_, decode_pairs_;
  Kernel plan_clusters_, decode_clusters_;
  struct Clusters {
    int32_t blocks;  // of one
    int32_t count;   // that run at the same time
  };
  std::vector<Clusters> clusters_;  // smaller ones first
  MlaWorkList reserved_{};
  MlaBounds limits_{1, 0};
  // Of the planned batch.
  MlaWorkList work_{};
  MlaJoins joins_ = MlaJoins::merge;
  BatchParams batch_{};
  bool prefix_settled_ = false;
  mutable bool list_settled_ = false;  // a layer of the planned batch has been enqueued
  mutable MlaDecodeMaps maps_;
};

}  // namespace fovea::kernels::cuda
