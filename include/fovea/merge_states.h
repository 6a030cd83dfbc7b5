// SPDX-License-Identifier: Apache-2.0
// Joining attention to disjoint sets of keys: a context cut over several devices, caches in two
// places, a prefix attended to by itself. With LSE = ln(e^a + e^b) the output of both sets is
// O_a e^(a - LSE) + O_b e^(b - LSE) (arXiv:2501.01005, section 2.2).
#pragma once

#include <cstdint>
#include <memory>

#include "fovea/device.h"
#include "fovea/lse.h"
#include "fovea/tensor.h"
#include "fovea/thread_pool.h"

namespace fovea {

// What forward() gives for some of the keys, without sinks. A row that saw none is (0, -inf).
// States of other libraries are brought into this form first: FlashMLA's and CUTLASS' LSE is +inf
// where a row saw nothing.
struct AttentionState {
  HeadRows out = {};    // [tokens, heads, dim]
  NaturalLse lse = {};  // [tokens, heads]
};

struct StateShape {
  DType dtype = DType::f32;  // of out: fp32, bf16 or fp16, on a GPU bf16 or fp16
  int32_t heads = 0;
  int32_t dim = 0;  // of a head of out; on a GPU even
};

// Bound to one shape and device. Calls on one object must not overlap.
class StateMerger {
 public:
  virtual ~StateMerger() = default;
  // `into` becomes the state over the keys of both; rows of `part` with an LSE of -inf are not
  // read. The two share no memory; for 0 tokens they may be absent. On a GPU both are device
  // memory, rows begin at multiples of 4 bytes, and the call enqueues one kernel, also in a
  // capture, and leaves the device current. Throws Error{invalid_argument} naming what is absent,
  // negative, misaligned, of another dtype or written twice (strides of into.out that make rows
  // overlap, memory of both states), and on the CPU Error{out_of_memory} naming the state.
  virtual void merge(const AttentionState& into, const AttentionState& part, int64_t tokens,
                     Stream stream = nullptr) = 0;
};

// `threads` outlives the merger; null on a GPU. Throws Error{invalid_argument} naming the field
// that is out of range, or Error{unsupported} saying why this device has no kernel for the shape.
std::unique_ptr<StateMerger> make_state_merger(const StateShape& shape, Device device,
                                               ThreadPool* threads);

}  // namespace fovea
