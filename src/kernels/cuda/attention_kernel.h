// SPDX-License-Identifier: Apache-2.0
// What a backend asks of a family of attention kernels. A family folder with its launch.cc offers
// one AttentionFamily; backends name the families they are made of in a table.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/attention_spec.h"
#include "fovea/kv_cache.h"
#include "gpu/kernel_pack.h"
#include "kernels/cuda/common/attention_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

// What decides which variant serves and what can be prepared for it before the first pass.
struct AttentionSetup {
  AttentionSpec spec;  // kind mha
  KvCacheSpec cache;   // of scopes with a cache
  int sm = 0;
  // Of every layer of the pool, for tensor maps; empty while only variants are asked for, and for
  // packed keys. Valid as long as the loaded kernel.
  std::vector<KvLayerView> layers;
};

// A loaded variant, bound to one setup. Calls only enqueue: nothing is allocated or copied from the
// host, and all of it is legal in a capture.
class AttentionKernel {
 public:
  virtual ~AttentionKernel() = default;

  // Fills batch.work's list from the batch's lengths on the device. Once per pass.
  virtual void plan(const PlanParams& params, Stream stream) const = 0;
  // Works through the planned list: out and lse are complete afterwards. params.keys are those of
  // `layer`.
  virtual void attend(const AttentionParams& params, int32_t layer, Stream stream) const = 0;
};

struct AttentionFamily {
  std::string_view folder;    // below kernels/cuda
  int32_t row_tile = 0;       // query rows of a work item; the loaded kernels must agree
  int32_t blocks_per_sm = 1;  // CTAs of the persistent grid

  // Every kernel load() takes from the store; empty when no variant of the family can serve the
  // setup, baked or not.
  std::vector<gpu::KernelVariant> (*variants)(const AttentionSetup& setup) = nullptr;
  // The device must be bound. Error{unsupported} as Kernel's constructor.
  std::unique_ptr<AttentionKernel> (*load)(const AttentionSetup& setup,
                                           gpu::KernelStore& store) = nullptr;
};

// "bf16", "f8e4m3", ...: a dtype as variants.txt spells it; nullopt: no kernel has such a type.
std::optional<std::string> variant_type(DType dtype);

// The baked variant of least work whose first two columns are at least (head_dim, head_dim_v) and
// whose others equal `rest`; without one the variant of exactly these dims, rounded up to 16, which
// the store compiles.
std::vector<std::string> fitting_values(std::string_view folder, int32_t head_dim,
                                        int32_t head_dim_v, const std::vector<std::string>& rest);

// The families, each defined in its folder.
const AttentionFamily& portable_attention();

}  // namespace fovea::kernels::cuda
