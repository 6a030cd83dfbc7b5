// SPDX-License-Identifier: Apache-2.0
// Prepares a case of `fovea bench attention` on the CPU for timing and verification.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/attention_suite.h"

namespace fovea::bench {

// A prepared case: filled caches and a batch to time.
class Workload {
 public:
  // `wish` has the syntax of parse_backend_wish(). Throws Error{unsupported} if no backend supports
  // the case.
  Workload(const AttentionCase& config, ThreadPool& threads, const std::string& wish);

  void plan() { backend_->plan(batch_); }
  void forward(int32_t layer);
  // Returns ||out - expected|| / ||expected|| over sampled rows; `expected` is computed in fp64
  // from the stored values.
  double error() const;
  int32_t layers() const { return layers_; }
  const std::string& backend() const { return name_; }

 private:
  size_t row_elements() const { return static_cast<size_t>(config_.kv_heads) * config_.head_dim; }
  // k_ and v_ contain the rows of all cached tokens, then those of the new ones.
  int32_t prefix() const { return config_.kv_len - config_.q_len; }
  size_t new_row(size_t token) const {
    return static_cast<size_t>(config_.batch) * prefix() + token;
  }
  size_t row_of(int32_t request, int32_t token) const {
    return token < prefix()
               ? static_cast<size_t>(request) * prefix() + token
               : new_row(static_cast<size_t>(request) * config_.q_len + token - prefix());
  }
  void place_requests();
  void fill_cache(ThreadPool& threads);
  double row_error(int32_t request, int32_t row, int32_t head, double& norm) const;

  AttentionCase config_;
  std::string name_;
  int32_t layers_ = 1;
  std::unique_ptr<KvPool> pool_;
  std::unique_ptr<AttentionBackend> backend_;
  std::vector<int32_t> request_slots_, request_rows_, kv_lens_, q_indptr_;
  std::vector<int64_t> out_slots_;
  std::vector<std::byte> q_, k_, v_, out_;
  BatchView batch_;
};

}  // namespace fovea::bench
