// SPDX-License-Identifier: Apache-2.0
// Merges attention over disjoint sets of keys: a context divided over several devices, two caches,
// or a prefix that was attended to separately. With LSE = ln(e^a + e^b) the output over both sets
// is O_a e^(a - LSE) + O_b e^(b - LSE) (arXiv:2501.01005, section 2.2).
#pragma once

#include <cstdint>
#include <memory>

#include "fovea/api.h"
#include "fovea/device.h"
#include "fovea/lse.h"
#include "fovea/tensor.h"
#include "fovea/thread_pool.h"

namespace FOVEA_API fovea {

// The result of forward() over some of the keys, without sinks. A row that saw no key is (0, -inf).
// Convert states of other libraries first: FlashMLA and CUTLASS give an LSE of +inf for such rows.
struct AttentionState {
  HeadRows out = {};    // [tokens, heads, dim]
  NaturalLse lse = {};  // [tokens, heads]
};

struct StateShape {
  DType dtype = DType::f32;  // type of out: fp32, bf16 or fp16; on a GPU bf16 or fp16
  int32_t heads = 0;
  int32_t dim = 0;  // values per head of out; on a GPU even
};

// Bound to one shape and device. Calls on one object must not overlap.
class StateMerger {
 public:
  virtual ~StateMerger() = default;
  // Turns `into` into the state over the keys of both. Rows of `part` with an LSE of -inf are not
  // read. The two states share no memory; for 0 tokens they may be absent. On a GPU both are device
  // memory, rows begin at multiples of 4 bytes, and the call enqueues one kernel, also in a
  // capture, and leaves the device current. Throws Error{invalid_argument} naming a tensor that is
  // absent, misaligned, of another dtype or overlapping (rows of into.out, or the two states), and
  // on the CPU Error{out_of_memory} naming the state.
  virtual void merge(const AttentionState& into, const AttentionState& part, int64_t tokens,
                     Stream stream = nullptr) = 0;
};

// Returns a merger. `threads` must outlive it and is null on a GPU. Throws Error{invalid_argument}
// naming the field that is out of range, or Error{unsupported} with the reason why this device has
// no kernel for the shape.
std::unique_ptr<StateMerger> make_state_merger(const StateShape& shape, Device device,
                                               ThreadPool* threads);

}  // namespace fovea
