// SPDX-License-Identifier: Apache-2.0
// The interface between backends and families of attention kernels. The launch.cc of a family
// defines its AttentionFamily; a table of each backend names its families.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/workspace_carver.h"
#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"
#include "gpu/kernel_pack.h"
#include "kernels/cuda/kernel.h"
#include "kernels/cuda/plan_queue.h"

namespace fovea::kernels::cuda {

// The layer and the device: they decide which variant serves, and what is prepared before the first
// pass.
struct AttentionSetup {
  AttentionSpec spec;  // kind mha
  KvCacheSpec cache;   // for scopes with a cache
  int sm = 0;
  int32_t multiprocessors = 0;
  // The last columns of packed keys that all heads share: they come as PlanRequest::shared_keys.
  int32_t shared_key_dims = 0;
  // Every layer of the pool, for tensor maps. Empty for packed keys, and while only variants or
  // bytes are wanted. Must stay valid as long as the loaded kernel.
  std::vector<KvLayerView> layers;
};

// The host's bounds of a batch's keys, which hold for every replay of a captured pass.
struct ExpectedKeys {
  bool prefix_written = false;  // BatchHints::prefix_written, for kernels that can read ahead
  int32_t max_kv_len = 0;       // keys of a request; 0: those of the limits
  int32_t requests = 0;         // number of requests with keys, at most; 0: all
  // The kernel before each attend() writes these keys, and waits for all earlier work before it
  // lets attention start: attention need not wait again for its other inputs.
  bool written_last = false;
};

// The columns of packed keys that all heads share (AttentionSetup::shared_key_dims), in device
// memory: rows in number and order as those of AttentionParams::keys.k.
struct SharedKeys {
  const void* rows = nullptr;
  int64_t row_stride = 0;  // elements
};

// How a kernel takes part in a pass.
enum class PassRole : uint8_t {
  alone,       // serves every request
  concurrent,  // serves the requests of BatchParams::min_planned_q_len to max_planned_q_len new
               // tokens, while a kernel of another family serves the others; the one for short
               // requests attends first, directly before the one for long requests
  groups,      // serves groups of requests that share keys, one level of a cascade
};

// Everything that plan() needs to know. Host figures are bounds that hold for every replay.
struct PlanRequest {
  BatchParams batch{};
  int32_t tokens = 0;  // new tokens, at most
  PassRole role = PassRole::alone;
  ExpectedKeys keys;
  SharedKeys shared_keys;
  // Role groups: the launch before each attend() is a kernel for short requests whose results
  // attention does not need, so that both can run at the same time.
  bool after_decode = false;
  // Role groups: receives where attend() leaves partial results that it does not merge.
  PrefixState* unmerged = nullptr;
};

// A loaded variant, bound to one setup. plan() and attend() only enqueue: they allocate nothing,
// copy nothing from the host, and are legal in a capture.
class AttentionKernel {
 public:
  virtual ~AttentionKernel() = default;

  // Takes its part of the workspace: AttentionFamily::workspace_bytes of device memory, 64-byte
  // aligned. The bytes belong to the kernel from a plan() to the last attend() of its pass; before
  // a plan() they may hold anything.
  virtual void reserve(const BatchLimits& limits, std::byte* workspace) = 0;
  // Once per pass: adds the plan that orders the batch's work by its lengths on the device. The
  // levels of a cascade are planned in order, level 0 first.
  virtual void plan(const PlanRequest& request, PlanQueue& plans) = 0;
  // Computes the planned batch: out and lse are complete afterwards. params.keys are those of
  // `layer`; packed keys are one page, whose strides give its rows (0: as many as new tokens). The
  // kernel sets params.work itself.
  virtual void attend(const AttentionParams& params, int32_t layer, gpu::Launcher launcher) = 0;
};

struct AttentionFamily {
  std::string_view folder;  // below kernels/cuda
  int32_t row_tile = 0;     // largest number of packed (token, q head of a group) rows at a time

  // Returns every kernel that load() takes from the store; empty if no variant of the family, baked
  // or not, can serve the setup.
  std::vector<gpu::KernelVariant> (*variants)(const AttentionSetup& setup) = nullptr;
  // Returns the exact upper bound over all batches within the limits. Touches no device.
  size_t (*workspace_bytes)(const AttentionSetup& setup, const BatchLimits& limits) = nullptr;
  // Loads the kernels onto the bound device. Error{unsupported} as Kernel's constructor.
  std::unique_ptr<AttentionKernel> (*load)(const AttentionSetup& setup,
                                           gpu::KernelStore& store) = nullptr;
};

// Returns the largest number of row tiles of a batch: the sum of ceil(rows / row_tile) over
// requests.
int64_t max_tiles(const AttentionSpec& spec, const BatchLimits& limits, int32_t row_tile);

// The smallest and the largest row tile, in rows, of the plans that use one list.
struct RowTiles {
  int32_t min, max;
};

// Takes the work list of portable/plan and its partial results, for batches within the limits:
// items for the smallest row tiles, partial results for the largest. A carver with a null base only
// counts.
WorkList carve_work_list(WorkspaceCarver& workspace, const AttentionSetup& setup,
                         const BatchLimits& limits, RowTiles row_tiles, int32_t ctas);

// "bf16", "f8e4m3", ...: a dtype as variants.txt spells it; nullopt: no kernel has such a type.
std::optional<std::string> variant_type(DType dtype);

// The baked variant of least work whose first two columns are at least (head_dim, head_dim_v) and
// whose others equal `rest`; without one the variant of exactly these dims, rounded up to 16, which
// the store compiles.
std::vector<std::string> fitting_values(std::string_view folder, int32_t head_dim,
                                        int32_t head_dim_v, const std::vector<std::string>& rest);

// The families. Each is defined in its folder.
const AttentionFamily& portable_prefill();
const AttentionFamily& portable_decode();
const AttentionFamily& hopper_decode();
const AttentionFamily& hopper_prefill();
// Packed rows of a request up to which hopper_decode() serves batches without prefixes faster than
// hopper_prefill().
int32_t hopper_max_decode_rows(const AttentionSetup& setup);
// For explain(): the tiles and clusters of decodes, in words. Empty if hopper_decode() does not
// serve the layer.
std::string describe_hopper_decode(const AttentionSetup& setup, const BatchLimits& limits);
// For explain(): the form in which prompts are computed, in words. Empty if hopper_prefill() does
// not serve the layer, or if the process has not all of its kernels yet.
std::string describe_hopper_prefill(const AttentionSetup& setup, const BatchLimits& limits);
// Attends to keys that requests share, with results in f32.
const AttentionFamily& hopper_groups();

}  // namespace fovea::kernels::cuda
