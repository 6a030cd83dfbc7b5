// SPDX-License-Identifier: Apache-2.0
// Bytes that an engine takes, counters of its work, and times of its passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "fovea/api.h"

namespace FOVEA_API fovea {

// Bytes that an engine allocates on its device, by purpose.
struct EngineMemory {
  size_t weights = 0;      // on the CPU, weights of files stay mapped
  size_t caches = 0;       // all pools: keys and values, windows, recurrent states
  size_t activations = 0;  // for a pass of max_batch_tokens tokens
  size_t positions = 0;    // tables of rotary positions
  size_t attention = 0;    // workspace of the attention backends
  size_t logits = 0;       // logits of one pass that are sampled or scored
  size_t products = 0;     // on a GPU: workspace of matrix products
  size_t batch = 0;        // arrays of a batch, request table
  size_t graphs = 0;       // on a GPU: free memory taken by captured steps
  size_t drafter = 0;      // the draft model with all of these, but for its graphs

  size_t total() const {
    return weights + caches + activations + positions + attention + logits + products + batch +
           graphs + drafter;
  }
  std::string explain() const;  // one line with all parts that are not 0, in MB
};

// Captured steps of one kind on a GPU.
struct GraphCount {
  int32_t graphs = 0;
  size_t bytes = 0;  // free memory that their capture took; the driver takes it in blocks
};

// The captured steps of an engine, by kind.
struct EngineGraphs {
  GraphCount decodes;          // without shared prefixes
  GraphCount shared_prefixes;  // decodes that read them once
  GraphCount drafts;           // verifications
  GraphCount chunks;           // steps with chunks of prompts

  int32_t count() const {
    return decodes.graphs + shared_prefixes.graphs + drafts.graphs + chunks.graphs;
  }
  std::string explain() const;  // one line with all kinds that there are; empty if there are none
};

struct EngineStats {
  int64_t steps = 0;
  int64_t prefill_tokens = 0, decode_tokens = 0;
  double prefill_seconds = 0, decode_seconds = 0;
  EngineMemory memory;
  EngineGraphs graphs;
  int64_t shared_steps = 0;                     // steps that read shared prefixes once
  int64_t overlapped_steps = 0;                 // steps enqueued while another one ran
  int64_t prefix_queries = 0, prefix_hits = 0;  // tokens
  int64_t preemptions = 0;
  int64_t draft_steps = 0;      // steps that verified drafts
  int64_t draft_requests = 0;   // requests with drafts, summed over these steps
  int64_t drafts = 0;           // tokens guessed and verified
  int64_t accepted_drafts = 0;  // drafts that became text
  // Tokens per second of steps with drafts, divided by those of steps without for as many requests.
  // 0: not measured.
  double speculation_gain = 0;
  int64_t kv_pages = 0, kv_pages_free = 0;  // pages of the full pools without the reserved page
};

// One pass. Times are seconds since the engine was loaded, on the host's clock. On the CPU a pass
// runs between enqueue_begin and wait_end.
struct StepRecord {
  int64_t step = 0;
  int32_t requests = 0, tokens = 0;
  int32_t decodes = 0;  // requests with one new token after their prompt
  int32_t drafts = 0;   // tokens that were guessed, a part of `tokens`
  int32_t draft_requests = 0, accepted_drafts = 0;
  bool overlapped = false;  // enqueued while another pass ran
  double schedule_begin = 0, enqueue_begin = 0, enqueue_end = 0;
  double wait_begin = 0, wait_end = 0;  // the host waits for the drawn tokens
  double deliver_end = 0;               // tokens have become events
  double device_begin = 0, device_end = 0;
  double draft_device_seconds = 0;  // passes of a draft model or a head, before enqueue_begin

  // Returns the time that the host worked for this pass.
  double host_seconds() const { return (enqueue_end - schedule_begin) + (deliver_end - wait_end); }
};

}  // namespace fovea
