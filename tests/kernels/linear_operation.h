// SPDX-License-Identifier: Apache-2.0
// An operation of linear layers under test, and the batch that it computes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/linear_attention.h"
#include "support/random_values.h"

namespace fovea::kernels {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using test::random_values;

struct Request {
  int32_t q_len;
  int32_t cached;  // tokens before the new ones
  int32_t slot;
};

// A batch over a pool of seven slots.
struct Batch {
  std::vector<Request> requests;
  std::vector<int32_t> q_indptr, kv_lens, slots;

  explicit Batch(std::vector<Request> list) : requests(std::move(list)), q_indptr{0} {
    for (const Request& request : requests) {
      q_indptr.push_back(q_indptr.back() + request.q_len);
      kv_lens.push_back(request.cached + request.q_len);
      slots.push_back(request.slot);
    }
  }
  int32_t tokens() const { return q_indptr.back(); }
  StateBatch view() const {
    return {static_cast<int32_t>(requests.size()), q_indptr.data(), kv_lens.data(), slots.data()};
  }
};

inline constexpr int32_t kSlots = 7;

// New and continued requests, a request without tokens, padding, and slots without a request.
inline Batch mixed_batch() {
  return Batch({{90, 0, 3}, {1, 9, 1}, {0, 5, 5}, {3, 0, -1}, {67, 2, 6}, {1, 0, 2}});
}

// The states of new requests and of unused slots are NaN: the operations must not read them.
inline std::vector<float> make_states(const Batch& batch, int64_t size, int64_t stride) {
  std::vector<float> states = random_values(static_cast<size_t>(kSlots * stride), 3, -1, 1);
  for (int32_t slot = 0; slot < kSlots; ++slot) {
    const auto continued = std::find_if(
        batch.requests.begin(), batch.requests.end(),
        [&](const Request& request) { return request.slot == slot && request.cached > 0; });
    float* state = states.data() + slot * stride;
    if (continued == batch.requests.end()) std::fill_n(state, size, kNan);
    std::fill(state + size, state + stride, kNan);
  }
  return states;
}

// One operation under test. Computes tokens [begin, end) of request `index` of the batch, or the
// whole batch, from given states.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual std::string name() const = 0;
  virtual int64_t state_size() const = 0;
  virtual int64_t out_size() const = 0;
  virtual std::vector<std::vector<float>*> inputs() = 0;
  // True if the cuts of a prompt change last bits.
  virtual bool in_chunks() const { return false; }
  // `first` is the row of the inputs at which the batch begins.
  virtual void run_reference(const Batch& batch, int64_t first, float* states,
                             float* out) const = 0;
  virtual void run(const Batch& batch, int64_t first, float* states, float* out, int team,
                   cpu::Isa isa) const = 0;

  int64_t state_stride() const { return state_size() + 11; }

 protected:
  static constexpr int32_t kTokens = 200;

  static std::vector<float> random_rows(int64_t rows, int64_t width, unsigned seed, float low,
                                        float high) {
    return random_values(static_cast<size_t>(rows * width), seed, low, high);
  }
};

}  // namespace fovea::kernels
