// SPDX-License-Identifier: Apache-2.0
// Linear layers: a recurrent state per request instead of a KV cache. A pass of drafts leaves a
// copy of the state after each of them, so that rejected drafts are rolled back by continuing from
// an earlier copy.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <vector>

#include "fovea/select_backend.h"

namespace {

using namespace fovea;

const LinearSpec kLinear{
    .key_heads = 2, .value_heads = 4, .key_dim = 32, .value_dim = 32, .conv_width = 4};
const AttentionSpec kSpec{.kind = AttentionKind::gated_delta_net, .linear = kLinear};
const StateCacheSpec kState{.layers = 1,
                            .conv_dim = kLinear.conv_dim(),
                            .conv_width = kLinear.conv_width,
                            .heads = kLinear.value_heads,
                            .rows = kLinear.value_dim,
                            .columns = kLinear.key_dim};
const BatchLimits kLimits{.max_tokens = 32, .max_q_len = 32, .max_kv_len = 64};

// The values a model would compute for each token.
std::vector<float> values(const std::vector<int32_t>& tokens, int32_t width, float shift) {
  std::vector<float> result;
  for (const int32_t token : tokens) {
    for (int32_t i = 0; i < width; ++i) {
      result.push_back(std::sin(static_cast<float>(token * 17 + i)) * 0.5f + shift);
    }
  }
  return result;
}

class Layer {
 public:
  Layer() {
    const BackendRegistry registry = BackendRegistry::builtin();
    const Selection choice =
        select_backend(registry, {.spec = kSpec, .limits = kLimits, .device = cpu_device()});
    backend_ = choice.chosen->create({.spec = kSpec, .state = &states(), .threads = &threads_});
    backend_->reserve(kLimits);
  }
  StatePool& states() { return *states_; }

  // Continues the state in `slot` by tokens; `snapshots` get a copy after each token.
  std::vector<float> run(int32_t slot, const std::vector<int32_t>& tokens, int32_t length_before,
                         const std::vector<int32_t>& snapshots = {}) {
    const auto count = static_cast<int32_t>(tokens.size());
    const int32_t q_indptr[] = {0, count}, length = length_before + count;
    BatchView batch{.mode = ForwardMode::extend, .requests = 1, .tokens = count};
    batch.q_indptr = q_indptr;
    batch.kv_lens = {&length, 1};
    batch.linear.state_slots = {&slot, 1};
    batch.linear.snapshot_slots = snapshots;
    backend_->plan(batch);

    const std::vector<float> mixed = values(tokens, kLinear.conv_dim(), 0);
    const std::vector<float> log_decay = values(tokens, kLinear.value_heads, -0.6f);
    const std::vector<float> beta = values(tokens, kLinear.value_heads, 0.5f);
    std::vector<float> out(static_cast<size_t>(count * kLinear.value_heads * kLinear.value_dim));
    LayerTensors layer{
        .out = dense_rows(out.data(), DType::f32, kLinear.value_heads, kLinear.value_dim)};
    layer.linear = {.mixed = mixed.data(),
                    .conv_weight = conv_weight_.data(),
                    .log_decay = log_decay.data(),
                    .beta = beta.data(),
                    .l2_normalise_qk = true};
    backend_->forward(layer);
    return out;
  }

 private:
  ThreadPool threads_;
  std::unique_ptr<StatePool> states_ = make_state_pool(kState, /*slots=*/8);
  std::vector<float> conv_weight_ = values(std::vector<int32_t>(4, 1), kLinear.conv_dim(), 0.2f);
  std::unique_ptr<AttentionBackend> backend_;
};

}  // namespace

int main() {
  Layer layer;
  StatePool& states = layer.states();
  const int32_t request = *states.allocate();
  const std::vector<int32_t> snapshots{*states.allocate(), *states.allocate(), *states.allocate()};

  layer.run(request, {1, 2, 3, 4, 5}, 0);          // the prompt
  layer.run(request, {20, 21, 22}, 5, snapshots);  // three drafts; only the first is accepted
  const int32_t accepted = snapshots[0];           // the request continues from this state
  const std::vector<float> continued = layer.run(accepted, {30, 31}, 6);

  // The same text without drafts.
  const int32_t other = *states.allocate();
  const std::vector<float> whole = layer.run(other, {1, 2, 3, 4, 5, 20, 30, 31}, 0);
  const size_t tail = whole.size() - continued.size();
  float largest = 0;
  for (size_t i = 0; i < continued.size(); ++i) {
    largest = std::max(largest, std::fabs(continued[i] - whole[tail + i]));
  }
  for (const int32_t slot : {request, snapshots[1], snapshots[2]}) states.release(slot);
  std::cout << "after the rollback results differ by " << largest << "; a state takes "
            << kState.bytes_per_slot() << " bytes\n";
  return largest < 1e-5f ? 0 : 1;
}
