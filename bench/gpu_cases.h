// SPDX-License-Identifier: Apache-2.0
// The grid `fovea bench attention --device cuda` runs.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bench/attention_suite.h"
#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"

namespace fovea::bench {

struct RequestLengths {
  int32_t q_len = 1;   // new tokens
  int32_t kv_len = 1;  // tokens, new ones included
};

struct GpuCase {
  // "prefill-causal", "prefill-full", "extend", "decode", "decode-varlen", "decode-shared",
  // "mixed", "mla-decode", "mla-prefill-causal": the names of the peers' tables. Prefill and extend
  // are causal; prefill-full has no cache; mla-prefill-causal is attention over given keys and
  // values of MLA's widths. "mla-prefill" and "mla-extend" start from the latents, with MLA's
  // weights. "prefill-" and "extend-" with a feature ("prefill-cap") are layers that have it;
  // "verify-tree" verifies drafts; custom masks show what is visible without one.
  // "mla-decode-varlen" has the lengths of "decode-varlen".
  std::string phase;
  std::string work;  // the lengths in short: "8x4k", "64xlog-uniform"
  std::vector<RequestLengths> requests;
  AttentionSpec spec;
  DType kv_dtype = DType::bf16;
  bool mla_fp8_rows = false;     // KvLayout::mla_fp8_rows
  bool gives_positions = false;  // those that tokens have anyway
  int32_t page_size = 64;
  int32_t shared_prefix = 0;  // whole pages of tokens that all requests have in common,
  int32_t sharers = 0;        // or so many neighbours each
  int32_t prefix_levels = 0;  // of the limits: 1 attends to shared_prefix once
  int64_t min_prefix_savings = BatchLimits{}.min_prefix_savings;  // likewise

  std::string name() const;  // unique in the grid
  KvCacheSpec cache(int32_t layers) const;
  bool cached() const { return spec.scope == AttentionScope::decoder; }
  // Whether scores or masks are more than causal. The peers run without.
  bool has_features() const;
  bool fp8_products() const { return is_fp8(spec.q_dtype); }
  bool has_mla_weights() const { return spec.nope_dim > 0; }
  int32_t q_width() const;    // of a head as the call takes it
  int32_t out_width() const;  // of a head as the call returns it
  int32_t tokens() const;
  // Keys of its request that a new token sees: [first, second). Trees of drafts are chains, custom
  // masks hide nothing more.
  std::pair<int32_t, int32_t> visible(const RequestLengths& request, int32_t token) const;
  int32_t longest_q() const;
  int32_t longest_kv() const;
  // Whether the request is the first of those that have a prefix in common.
  bool begins_group(size_t request) const;
  double kv_bytes() const;  // of keys and values, read once
  double bytes() const;     // with q, out and MLA's weights
  // Two products over visible (query, key) pairs; of MLA from latents the form with fewer, with its
  // projections.
  double flops() const;

 private:
  double projection() const;  // elements of a head's two weight matrices
};

enum class GpuSuite {
  quick,  // a case of each kind, half a minute
  table,  // what targets are stated for
  full,   // every batch, length, group size, page size and feature of scores and masks
};

std::vector<GpuCase> gpu_cases(GpuSuite suite);

// A case of one length, from the command line.
GpuCase gpu_case(const AttentionCase& config);

}  // namespace fovea::bench
