// SPDX-License-Identifier: Apache-2.0
#include "fovea/speculation.h"

#include "attention/cuda/speculation.h"
#include "attention/host/speculation.h"
#include "core/check.h"
#include "core/check_device.h"
#include "core/memory_error.h"
#include "kernels/drafts.h"

namespace fovea {
namespace {

static_assert(kMaxDraftNodes == kernels::kMaxNodes);
constexpr int32_t kMaxRequests = 65535;  // as for a pass

void check_pools(std::span<KvPool* const> pools, Device device) {
  for (size_t i = 0; i < pools.size(); ++i) {
    check_argument(pools[i] != nullptr, "pools[{}] is null", i);
    check_argument(pools[i]->device() == device, "pools[{}] is on {}, the drafts are on {}", i,
                   device_name(pools[i]->device()), device_name(device));
  }
}

}  // namespace

BatchView draft_batch(const Drafts& drafts, const DraftPlaces& places, const DraftArrays& arrays) {
  BatchView batch;
  batch.mode = ForwardMode::target_verify;
  batch.requests = drafts.requests;
  batch.tokens = drafts.requests * drafts.width;
  batch.q_indptr = arrays.q_indptr;
  batch.kv_lens = arrays.kv_lens;
  batch.request_rows = places.request_rows;
  batch.table = places.table;
  batch.out_slots = arrays.out_slots;
  if (!drafts.parents.empty()) batch.positions = arrays.positions;
  batch.masks.tree.ancestors = arrays.ancestors;
  batch.hints.max_q_len = drafts.width;
  return batch;
}

std::unique_ptr<Speculation> make_speculation(const SpeculationLimits& limits,
                                              std::span<KvPool* const> pools, Device device,
                                              ThreadPool* threads) {
  check_argument(limits.max_requests > 0 && limits.max_requests <= kMaxRequests,
                 "max_requests is {}, must be in [1, {}]", limits.max_requests, kMaxRequests);
  check_argument(limits.width >= 1 && limits.width <= kMaxDraftNodes,
                 "width is {}, must be in [1, {}]", limits.width, kMaxDraftNodes);
  check_device(device, "device");
  check_pools(pools, device);
  return name_memory(
      [&]() -> std::unique_ptr<Speculation> {
        if (device.kind == DeviceKind::cuda) return make_cuda_speculation(limits, pools, device);
        check_argument(threads != nullptr, "threads is null, drafts on the CPU are moved by them");
        return make_host_speculation(limits, pools, *threads);
      },
      "the rows of {} pools", pools.size());
}

}  // namespace fovea
