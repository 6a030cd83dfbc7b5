// SPDX-License-Identifier: Apache-2.0
// A handle of every kind that needs no files, and a valid pass of two requests, for tests of wrong
// arguments. Arrays lie in the middle of larger regions, so that slightly wrong extents and strides
// stay inside memory of the test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "fovea/fovea.h"

namespace fovea::test {

inline constexpr int32_t kWorldRequests = 2, kWorldTokens = 5, kWorldQHeads = 4, kWorldKvHeads = 2;
inline constexpr int32_t kWorldDim = 32, kWorldPageSize = 4, kWorldPages = 9, kWorldContext = 16;

// One array and its view.
struct WorldArray {
  fovea_tensor tensor;
  char* data = nullptr;
  size_t bytes = 0;
  const DLTensor* view() const { return &tensor.view; }
};

class SmallWorld {
 public:
  SmallWorld();
  ~SmallWorld();
  SmallWorld(const SmallWorld&) = delete;
  SmallWorld& operator=(const SmallWorld&) = delete;

  // Restores the batch, the layer, all arrays and their views.
  void reset();
  fovea_status plan() { return fovea_backend_plan(backend, &batch, nullptr); }
  fovea_status forward() { return fovea_backend_forward(backend, &layer, nullptr); }
  // Returns out as the last forward() wrote it.
  std::vector<float> output() const;
  // Returns the address of every handle, in the order of handle kinds.
  std::vector<void*> handles() const;
  std::vector<WorldArray*> arrays();

  fovea_attention_spec spec;
  fovea_kv_cache_spec cache, window_cache;
  fovea_state_cache_spec state;
  fovea_batch_limits limits;
  fovea_selection_request request;
  fovea_device cpu = {FOVEA_CPU, 0};

  fovea_thread_pool* threads = nullptr;
  fovea_selection* selection = nullptr;
  fovea_request_table* table = nullptr;
  fovea_page_allocator* allocator = nullptr;
  fovea_kv_pool* pool = nullptr;
  fovea_kv_pool* window_pool = nullptr;
  fovea_state_pool* states = nullptr;
  fovea_prefix_cache* prefix_cache = nullptr;
  fovea_backend* backend = nullptr;
  fovea_merger* merger = nullptr;
  fovea_pass_addresses* addresses = nullptr;

  fovea_batch batch;
  fovea_layer_tensors layer;
  WorldArray q_indptr, kv_lens, rows, slots, out_slots, positions;
  WorldArray q, k, v, out, lse, sinks, cos, sin, rotary_positions;

 private:
  void make_specs();
  void make_handles();
  void place(WorldArray& array, fovea_dtype dtype, std::initializer_list<int64_t> shape,
             int32_t element);

  std::vector<char> memory_;
  size_t placed_ = 0;
};

}  // namespace fovea::test
