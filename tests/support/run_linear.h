// SPDX-License-Identifier: Apache-2.0
// A backend of linear layers over one state pool whose slots hold NaN until a request starts in
// them, in a guarded workspace of exactly workspace_bytes(), on the test device.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "fovea/select_backend.h"
#include "support/device_mirror.h"
#include "support/linear_case.h"
#include "support/packed_batch.h"
#include "support/poison.h"

namespace fovea::test {

BackendRequest request_of(const LinearCase& test, int threads);

// A built-in backend and a case that it takes: the parameter of contract tests.
struct LinearContract {
  BackendEntry entry;
  LinearCase test;
};
void PrintTo(const LinearContract& contract, std::ostream* to);
// Returns none if the test device is absent.
std::vector<LinearContract> linear_contracts(const std::vector<LinearCase>& cases);
inline std::string name_of(const ::testing::TestParamInfo<LinearContract>& info) {
  return info.param.entry.name + "_" + info.param.test.name;
}

inline constexpr int32_t kSnapshots = 6;

// The arrays of a batch that its pieces do not give. Absent ones mean none.
struct LinearExtras {
  std::vector<int32_t> snapshots = {};  // [tokens] the snapshot after each token, or -1
  std::vector<int32_t> drafts = {};     // [pieces] the last tokens of each that are drafts
};

class LinearRun {
 public:
  // The slots of the pool keep up to max_drafts drafts.
  LinearRun(const BackendEntry& entry, const LinearCase& test, const LinearData& data, int threads,
            int32_t max_drafts = 0);

  // Returns the outputs of the batch's rows. A piece of a request that the case does not have is
  // padding with state slot -1. snapshots[t]: the snapshot that the state after token t becomes,
  // -1: none.
  std::vector<float> run(const std::vector<Piece>& pieces,
                         const std::vector<int32_t>& snapshots = {},
                         ForwardMode mode = ForwardMode::mixed);
  std::vector<float> run_with(const LinearExtras& extras, const std::vector<Piece>& pieces,
                              ForwardMode mode = ForwardMode::mixed);
  // On a GPU: captures a pass over the first batch, then replays it with the contents of each. They
  // have as many requests as the first and no more tokens. drafts[i]: those of batch i, or absent.
  // Returns the outputs of each.
  std::vector<std::vector<float>> replay(const std::vector<std::vector<Piece>>& batches,
                                         ForwardMode mode,
                                         const std::vector<std::vector<int32_t>>& drafts = {});

  // Returns the error of a forward() after a plan() that was refused.
  std::string error_behind_a_refused_plan();

  // Lets the request continue from a snapshot.
  void restore(size_t request, int32_t snapshot) { slots_[request] = snapshot_slot(snapshot); }
  // Exchanges the slot of the request with the snapshot, as commit() does.
  void exchange(size_t request, int32_t snapshot) {
    std::swap(slots_[request], snapshot_slots_[static_cast<size_t>(snapshot)]);
  }

  // Checks that the other layer and unused slots have not changed.
  bool others_untouched() const;

 private:
  struct Arrays;

  void poison_states();
  bool holds_nan(int32_t layer, int32_t slot) const;
  int64_t draft_values() const;  // in a slot
  Arrays arrays_of(const std::vector<Piece>& pieces, const LinearExtras& extras) const;
  void append(const Piece& piece, Arrays& to) const;
  // The arrays as a backend sees them: on the CPU, or those of their copy on a GPU.
  BatchView view(const Arrays& arrays, ForwardMode mode, const DeviceMirror* twin) const;
  // Makes every call of the layer. On a GPU it only enqueues them.
  void forward(const Arrays& arrays, const DeviceMirror* twin);
  static LayerTensors tensors(const LinearTensors& linear, const HeadRows& out,
                              const DeviceMirror* twin);
  // Returns the rows of the batch's tokens. No row behind them was written.
  std::vector<float> rows_of(Arrays& arrays) const;
  HostBlocks blocks(Arrays& arrays) const;
  ::testing::AssertionResult guards_intact() const;

  int32_t snapshot_slot(int32_t snapshot) const {
    const bool exists = snapshot >= 0 && snapshot < kSnapshots;
    if (exists) return snapshot_slots_[static_cast<size_t>(snapshot)];
    return static_cast<int32_t>(data_.sequences.size()) + 1 + snapshot;
  }
  int64_t width() const {
    return int64_t{test_.spec.linear.value_heads} * test_.spec.linear.value_dim;
  }

  LinearCase test_;
  const LinearData& data_;
  ThreadPool threads_;
  std::vector<int32_t> slots_;           // state slot of each sequence
  std::vector<int32_t> snapshot_slots_;  // [kSnapshots]
  std::unique_ptr<StatePool> pool_;
  GuardedBuffer workspace_;
  std::unique_ptr<DeviceMirror> device_workspace_;
  std::unique_ptr<gpu::OwnedStream> stream_;
  std::unique_ptr<AttentionBackend> backend_;
};

}  // namespace fovea::test
