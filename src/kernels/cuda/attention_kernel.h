// SPDX-License-Identifier: Apache-2.0
// What a backend asks of a family of attention kernels. A family folder with its launch.cc offers
// one AttentionFamily; backends name the families they are made of in a table.
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
#include "kernels/cuda/pass_plan.h"

namespace fovea::kernels::cuda {

// What decides which variant serves and what can be prepared for it before the first pass.
struct AttentionSetup {
  AttentionSpec spec;  // kind mha
  KvCacheSpec cache;   // of scopes with a cache
  int sm = 0;
  int32_t multiprocessors = 0;
  // Of packed keys: so many columns, the last ones, are the same for all heads and lie apart, as
  // AttentionKernel::share_keys() says.
  int32_t shared_key_dims = 0;
  // Of every layer of the pool, for tensor maps; empty while only variants or bytes are asked for,
  // and for packed keys. Valid as long as the loaded kernel.
  std::vector<KvLayerView> layers;
};

// What is known of a batch's keys before it is planned, as bounds that hold for every replay.
struct ExpectedKeys {
  bool prefix_settled = false;  // BatchHints::prefix_written, for kernels that can read ahead
  int32_t max_kv_len = 0;       // of a request; 0: that of the limits
  int32_t requests = 0;         // that have any; 0: all
  // The kernel ahead of each attend() brings these keys and waits for all before itself before it
  // lets attention begin: what else attention reads is there by then.
  bool come_last = false;
};

// A loaded variant, bound to one setup. plan() and attend() only enqueue: nothing is allocated or
// copied from the host, and all of it is legal in a capture.
class AttentionKernel {
 public:
  virtual ~AttentionKernel() = default;

  // Takes its part of the workspace: AttentionFamily::workspace_bytes of device memory, 64-byte
  // aligned. The bytes are the kernel's from a plan() to the last attend() of its pass; before a
  // plan() they may be anything.
  virtual void reserve(const BatchLimits& limits, std::byte* workspace) = 0;
  // With AttentionSetup::shared_key_dims, before the first attend(): the rows of these columns on
  // the device, as many and in the order of those of params.keys.k; the stride is in elements.
  virtual void share_keys(const void* /*rows*/, int64_t /*row_stride*/) {}
  // Of the batch planned next.
  virtual void expect_keys(const ExpectedKeys& /*keys*/) {}
  // This kernel attends to groups. Of the pass over them planned next, whose plan() another kernel
  // may have for all levels: a bound of tokens that holds for every replay, and whether the launch
  // ahead of each attend() is of a kernel of few new tokens whose results it does not need, so that
  // both can run at a time.
  virtual void expect_groups(int32_t /*tokens*/, bool /*beside*/) {}
  // Once per pass: adds the plan that orders the batch's work by its lengths on the device.
  // `tokens` is an upper bound that holds for every replay. With batch.max_planned_q_len the kernel
  // shares the pass with one of another family: those for few new tokens attend first, directly
  // before those for many.
  virtual void plan(const BatchParams& batch, int32_t tokens, PassPlan& pass) = 0;
  // By bounds that hold for every replay, as plan(): whether a batch without shared prefixes is
  // faster here than by the kernel for few new tokens, which could serve it.
  virtual bool outruns_decode(const BatchParams& /*batch*/) const { return false; }
  // Works through the planned batch: out and lse are complete afterwards. params.keys are those of
  // `layer`; packed ones are one page, whose strides say how many rows it has (0: as many as new
  // tokens). params.work is the kernel's own business.
  virtual void attend(const AttentionParams& params, int32_t layer, Stream stream) = 0;
  // Of a pass over groups: where attend() leaves the parts of a group that it does not merge, if it
  // does not.
  virtual void tell_parts(PrefixState& /*state*/) const {}
};

struct AttentionFamily {
  std::string_view folder;  // below kernels/cuda
  int32_t row_tile = 0;     // packed (token, q head of a group) rows it computes at once, at most

  // Every kernel load() takes from the store; empty when no variant of the family can serve the
  // setup, baked or not.
  std::vector<gpu::KernelVariant> (*variants)(const AttentionSetup& setup) = nullptr;
  // Exact upper bound over every batch within the limits. Touches no device.
  size_t (*workspace_bytes)(const AttentionSetup& setup, const BatchLimits& limits) = nullptr;
  // The device must be bound. Error{unsupported} as Kernel's constructor.
  std::unique_ptr<AttentionKernel> (*load)(const AttentionSetup& setup,
                                           gpu::KernelStore& store) = nullptr;
};

// Row tiles of a batch at most: sum over requests of ceil(rows / row_tile).
int64_t most_tiles(const AttentionSpec& spec, const BatchLimits& limits, int32_t row_tile);

// Rows of the row tiles of different plans over one list.
struct RowTiles {
  int32_t least, most;
};

// The work list of portable/plan with its partial results, for batches within the limits: most
// items are those of the least row tiles, most partial results those of the largest. Over a null
// base the carver only counts.
WorkList carve_work_list(WorkspaceCarver& workspace, const AttentionSetup& setup,
                         const BatchLimits& limits, RowTiles row_tiles, int32_t ctas);

// "bf16", "f8e4m3", ...: a dtype as variants.txt spells it; nullopt: no kernel has such a type.
std::optional<std::string> variant_type(DType dtype);

// The baked variant of least work whose first two columns are at least (head_dim, head_dim_v) and
// whose others equal `rest`; without one the variant of exactly these dims, rounded up to 16, which
// the store compiles.
std::vector<std::string> fitting_values(std::string_view folder, int32_t head_dim,
                                        int32_t head_dim_v, const std::vector<std::string>& rest);

// The families, each defined in its folder.
const AttentionFamily& portable_prefill();
const AttentionFamily& portable_decode();
const AttentionFamily& hopper_decode();
const AttentionFamily& hopper_prefill();
// Of keys that requests share, with results in f32.
const AttentionFamily& hopper_groups();

}  // namespace fovea::kernels::cuda
