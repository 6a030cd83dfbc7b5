// SPDX-License-Identifier: Apache-2.0
// Cases of `fovea bench attention --device cuda`.
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
  int32_t kv_len = 1;  // tokens, including new ones
};

struct GpuCase {
  // Names follow the peers' tables: "prefill-causal", "prefill-full", "extend", "decode",
  // "decode-varlen", "decode-shared", "mixed", "mla-decode", "mla-prefill-causal". Prefill and
  // extend are causal; prefill-full has no cache; mla-prefill-causal is attention over given keys
  // and values with MLA's widths. "mla-prefill" and "mla-extend" start from the latents and use
  // MLA's weights. "prefill-" and "extend-" with a feature ("prefill-cap") are layers with that
  // feature. "verify-tree" verifies drafts. Custom masks equal the causal mask. "mla-decode-varlen"
  // has the lengths of "decode-varlen".
  std::string phase;
  std::string work;  // abbreviated lengths: "8x4k", "64xlog-uniform"
  std::vector<RequestLengths> requests;
  AttentionSpec spec;
  DType kv_dtype = DType::bf16;
  bool mla_fp8_rows = false;     // uses KvLayout::mla_fp8_rows
  bool gives_positions = false;  // passes the default positions explicitly
  int32_t page_size = 64;
  int32_t shared_prefix = 0;  // tokens (whole pages) that all requests share,
  int32_t sharers = 0;        // or that groups of this many neighbours share
  int32_t prefix_levels = 0;  // limit; 1 reads shared_prefix once for all sharers
  int64_t min_prefix_savings = BatchLimits{}.min_prefix_savings;  // limit

  std::string name() const;  // unique within the suite
  KvCacheSpec cache(int32_t layers) const;
  bool cached() const { return spec.scope == AttentionScope::decoder; }
  // Returns true if scores or masks are more than causal. The peers run without these features.
  bool has_features() const;
  bool fp8_products() const { return is_fp8(spec.q_dtype); }
  bool has_mla_weights() const { return spec.mla.nope_dim > 0; }
  int32_t q_width() const;    // dims of a head of the call's input
  int32_t out_width() const;  // dims of a head of the call's output
  int32_t tokens() const;
  // Returns the range [first, second) of the request's keys that a new token sees. Drafts form a
  // chain, and custom masks hide no further keys.
  std::pair<int32_t, int32_t> visible(const RequestLengths& request, int32_t token) const;
  int32_t longest_q() const;
  int32_t longest_kv() const;
  // Returns true if the request is the first of a group that shares a prefix.
  bool begins_group(size_t request) const;
  double kv_bytes() const;  // keys and values, each read once
  double bytes() const;     // with q, out and MLA's weights
  // Counts two products over visible (query, key) pairs. For MLA from latents, counts the cheaper
  // form, with its projections.
  double flops() const;

 private:
  double projection() const;  // elements of a head's two weight matrices
};

enum class GpuSuite {
  quick,  // one case of each kind, half a minute
  table,  // the cases with performance targets
  full,   // all batches, lengths, group sizes, page sizes, and features of scores and masks
};

std::vector<GpuCase> gpu_cases(GpuSuite suite);

// Makes a case with equal lengths from the command line.
GpuCase gpu_case(const AttentionCase& config);

}  // namespace fovea::bench
