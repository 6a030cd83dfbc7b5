// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_cases.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

namespace fovea::bench {
namespace {

constexpr int32_t kKilo = 1024;

std::string length_name(int32_t tokens) {
  return tokens % kKilo ? std::to_string(tokens) : fmt::format("{}k", tokens / kKilo);
}

struct Heads {
  int32_t q, kv;
};
constexpr Heads kGrouped{32, 8}, kWide{64, 8}, kEqual{32, 32};

GpuCase mha(std::string phase, Heads heads, int32_t head_dim) {
  GpuCase config;
  config.phase = std::move(phase);
  config.spec.q_heads = heads.q;
  config.spec.kv_heads = heads.kv;
  config.spec.head_dim = config.spec.head_dim_v = head_dim;
  config.spec.q_dtype = DType::bf16;
  return config;
}

GpuCase prefill(int32_t batch, int32_t tokens, Heads heads = kGrouped, int32_t head_dim = 128) {
  GpuCase config = mha("prefill-causal", heads, head_dim);
  config.work = fmt::format("{}x{}", batch, length_name(tokens));
  config.requests.assign(static_cast<size_t>(batch), {tokens, tokens});
  return config;
}

GpuCase full_prefill(int32_t batch, int32_t tokens, Heads heads) {
  GpuCase config = prefill(batch, tokens, heads);
  config.phase = "prefill-full";
  config.spec.scope = AttentionScope::encoder;
  return config;
}

GpuCase fp8_prefill(int32_t batch, int32_t tokens) {
  GpuCase config = prefill(batch, tokens);
  config.spec.q_dtype = config.kv_dtype = DType::f8e4m3;
  return config;
}

GpuCase extend(int32_t batch, int32_t tokens, int32_t context, Heads heads = kGrouped) {
  GpuCase config = mha("extend", heads, 128);
  config.work = fmt::format("{}x{} over {}", batch, length_name(tokens), length_name(context));
  config.requests.assign(static_cast<size_t>(batch), {tokens, tokens + context});
  return config;
}

GpuCase extend(int32_t page_size) {
  GpuCase config = extend(8, 512, 8 * kKilo);
  config.page_size = page_size;
  return config;
}

// Drafts to verify, and turns of a chat: few row tiles over many keys.
std::vector<GpuCase> few_new_tokens() {
  std::vector<GpuCase> cases;
  for (const auto& [batch, tokens, context] : {std::tuple{1, 8, 16},
                                               {8, 8, 4},
                                               {32, 8, 4},
                                               {1, 16, 16},
                                               {8, 16, 4},
                                               {32, 16, 4},
                                               {1, 64, 32},
                                               {8, 64, 16},
                                               {1, 128, 32},
                                               {4, 128, 8},
                                               {1, 512, 64}}) {
    cases.push_back(extend(batch, tokens, context * kKilo));
  }
  cases.push_back(extend(8, 8, 4 * kKilo, kWide));
  cases.push_back(extend(8, 32, 4 * kKilo, kEqual));
  GpuCase with_decodes = extend(1, 128, 32 * kKilo);
  with_decodes.phase = "mixed";
  with_decodes.work += "+64x4k";
  with_decodes.requests.insert(with_decodes.requests.end(), 64, {1, 4 * kKilo});
  cases.push_back(with_decodes);
  return cases;
}

// Layers like those of gemma2 (soft cap, window), gpt-oss (sinks, window of 128, heads of 64),
// mistral (window), llama4 (chunk), layers with ALiBi, and drafts to verify.
std::vector<GpuCase> feature_cases() {
  std::vector<GpuCase> cases;
  const auto add = [&](const char* feature, GpuCase config, auto&& change) {
    config.phase = fmt::format("{}-{}", config.phase == "extend" ? "extend" : "prefill", feature);
    change(config.spec);
    cases.push_back(config);
  };
  const auto window = [](int32_t keys) {
    return [keys](AttentionSpec& spec) { spec.window = keys; };
  };
  const auto cap = [](AttentionSpec& spec) { spec.scores.logit_cap = 50; };
  const auto alibi = [](AttentionSpec& spec) { spec.scores.has_alibi = true; };
  add("window-1k", prefill(4, 4 * kKilo), window(kKilo));
  add("window-4k", prefill(1, 16 * kKilo), window(4 * kKilo));
  add("chunk-8k", prefill(1, 32 * kKilo), [](AttentionSpec& spec) { spec.chunk = 8 * kKilo; });
  add("sinks", prefill(4, 4 * kKilo, kWide, 64),
      [](AttentionSpec& spec) { spec.scores.has_sinks = true; });
  add("sinks-window-128", prefill(4, 4 * kKilo, kWide, 64), [](AttentionSpec& spec) {
    spec.scores.has_sinks = true;
    spec.window = 128;
  });
  for (const GpuCase& config : {prefill(16, kKilo), prefill(4, 4 * kKilo), extend(64)}) {
    add("cap", config, cap);
    add("alibi", config, alibi);
  }
  add("cap", prefill(1, 16 * kKilo), cap);
  // Scores with a standard deviation of 20, many of which are near the cap.
  add("cap-steep", prefill(4, 4 * kKilo), [](AttentionSpec& spec) {
    spec.scores.logit_cap = 50;
    spec.scores.softmax_scale = 20 / std::sqrt(128.0F);
  });
  add("cap", prefill(4, 4 * kKilo, {16, 8}, 256), cap);
  add("cap-window-4k", prefill(1, 8 * kKilo, {16, 8}, 256), [](AttentionSpec& spec) {
    spec.scores.logit_cap = 50;
    spec.window = 4 * kKilo;
  });
  for (const GpuCase& config :
       {prefill(4, 4 * kKilo), prefill(4, 4 * kKilo + 5), prefill(4, 4 * kKilo, kEqual)}) {
    add("custom", config, [](AttentionSpec& spec) { spec.mask = MaskKind::custom; });
  }
  add("positions-window-1k", prefill(4, 4 * kKilo), window(kKilo));
  cases.back().gives_positions = true;
  for (const auto& [batch, drafts, context] :
       {std::tuple{1, 16, 16}, {8, 16, 4}, {8, 64, 4}, {32, 64, 4}, {8, 64, 16}}) {
    GpuCase config = extend(batch, drafts, context * kKilo);
    config.phase = "verify-tree";
    config.spec.mask = MaskKind::tree;
    cases.push_back(config);
  }
  return cases;
}

GpuCase decode(int32_t batch, int32_t length, Heads heads = kGrouped, int32_t page_size = 64,
               DType kv_dtype = DType::bf16) {
  GpuCase config = mha("decode", heads, 128);
  config.work = fmt::format("{}x{}", batch, length_name(length));
  config.requests.assign(static_cast<size_t>(batch), {1, length});
  config.page_size = page_size;
  config.kv_dtype = kv_dtype;
  return config;
}

// Gives 64 requests log-uniform lengths in 128 ... 32k. The seed gives a mean of 4391 tokens, as in
// the peers' table.
GpuCase log_uniform(GpuCase config) {
  config.phase += "-varlen";
  config.work = "64xlog-uniform";
  config.requests.clear();
  uint64_t state = 42;
  for (int i = 0; i < 64; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const double uniform = static_cast<double>(state >> 40) * 0x1p-24;
    config.requests.push_back({1, static_cast<int32_t>(128 * std::exp2(8 * uniform))});
  }
  return config;
}

// Requests with a shared prompt, which is read for each request or once.
std::vector<GpuCase> shared(int32_t batch, int32_t prefix, int32_t own) {
  GpuCase apart = mha("decode-shared", kGrouped, 128);
  apart.work = fmt::format("{}x{}+{}", batch, length_name(prefix), length_name(own));
  apart.requests.assign(static_cast<size_t>(batch), {1, prefix + own});
  apart.shared_prefix = prefix;
  GpuCase cascade = apart;
  cascade.prefix_levels = 1;
  return {apart, cascade};
}

GpuCase with_decodes(GpuCase config, int32_t decodes, int32_t length) {
  config.phase = config.has_mla_weights() ? "mla-mixed" : "mixed";
  config.work += fmt::format("+{}x{}", decodes, length_name(length));
  config.requests.insert(config.requests.end(), static_cast<size_t>(decodes), {1, length});
  return config;
}

// Prompts and decodes in one launch, and each kind alone for comparison.
std::vector<GpuCase> mixed() {
  const GpuCase prompts = prefill(2, 4 * kKilo);
  return {with_decodes(prompts, 64, 8 * kKilo), prompts, decode(64, 8 * kKilo)};
}

GpuCase invariant(GpuCase config) {
  config.spec.batch_invariant = true;
  return config;
}

// DeepSeek's absorbed form: keys of 576 dims, the first 512 of which are the values.
GpuCase mla_decode(int32_t q_heads, int32_t q_len, int32_t batch, int32_t length,
                   int32_t page_size = 64) {
  GpuCase config = mha("mla-decode", {q_heads, 1}, 576);
  config.spec.kind = AttentionKind::mla;
  config.spec.head_dim = config.spec.head_dim_v = 0;
  config.spec.mla = {.kv_lora_rank = 512, .rope_dim = 64};
  config.spec.scores.softmax_scale = 1 / std::sqrt(192.0f);
  config.work = fmt::format("{}x{}", batch, length_name(length));
  if (q_len > 1) config.work += fmt::format(" q{}", q_len);
  config.requests.assign(static_cast<size_t>(batch), {q_len, length});
  config.page_size = page_size;
  return config;
}

// DeepSeek's heads of 192 and 128 dims with keys and values per head.
GpuCase mla_prefill(int32_t heads, int32_t batch, int32_t tokens) {
  GpuCase config = prefill(batch, tokens, {heads, heads}, 192);
  config.phase = "mla-prefill-causal";
  config.spec.head_dim_v = 128;
  return config;
}

// The same with projections from and to the latents.
GpuCase mla_extend(int32_t q_heads, int32_t batch, int32_t q_len, int32_t context) {
  GpuCase config = mla_decode(q_heads, q_len, batch, q_len + context);
  config.phase = context > 0 ? "mla-extend" : "mla-prefill";
  config.work = context > 0
                    ? fmt::format("{}x{} over {}", batch, length_name(q_len), length_name(context))
                    : fmt::format("{}x{}", batch, length_name(q_len));
  config.spec.mla.nope_dim = config.spec.mla.v_dim = 128;
  return config;
}

// A decode step with projections.
GpuCase projected_decode(int32_t q_heads, int32_t batch, int32_t length) {
  GpuCase config = mla_extend(q_heads, batch, 1, length - 1);
  config.phase = "mla-decode-projected";
  config.work = fmt::format("{}x{}", batch, length_name(length));
  return config;
}

void append(std::vector<GpuCase>& cases, const std::vector<GpuCase>& more) {
  cases.insert(cases.end(), more.begin(), more.end());
}

GpuCase fp8_rows(GpuCase config) {
  config.mla_fp8_rows = true;
  config.kv_dtype = DType::f8e4m3;
  return config;
}

std::vector<GpuCase> quick_cases() {
  std::vector<GpuCase> cases = {prefill(16, kKilo),
                                prefill(2, 8 * kKilo),
                                prefill(4, 4 * kKilo, kGrouped, 64),
                                full_prefill(2, 8 * kKilo, kGrouped),
                                extend(1),
                                extend(64),
                                decode(1, kKilo),
                                decode(1, 64 * kKilo),
                                decode(8, 4 * kKilo),
                                decode(32, 4 * kKilo),
                                decode(128, 4 * kKilo),
                                decode(32, 4 * kKilo, kEqual, 1),
                                decode(32, 4 * kKilo, kGrouped, 64, DType::f8e4m3),
                                log_uniform(decode(1, kKilo))};
  append(cases, mixed());
  append(cases, {mla_decode(128, 1, 1, 4 * kKilo), mla_decode(128, 1, 32, 4 * kKilo)});
  return cases;
}

std::vector<GpuCase> prefill_table() {
  std::vector<GpuCase> cases;
  for (const Heads heads : {kGrouped, kEqual}) {
    for (const auto& [batch, tokens] :
         {std::pair{16, 1}, {8, 2}, {4, 4}, {2, 8}, {1, 16}, {1, 32}}) {
      cases.push_back(prefill(batch, tokens * kKilo, heads));
    }
    cases.push_back(full_prefill(2, 8 * kKilo, heads));
    for (const int32_t dim : {64, 256}) cases.push_back(prefill(4, 4 * kKilo, heads, dim));
  }
  append(cases, {fp8_prefill(2, 8 * kKilo), fp8_prefill(1, 16 * kKilo)});
  for (const int32_t page_size : {1, 16, 64, 128}) cases.push_back(extend(page_size));
  return cases;
}

// Decode cases of one group size and page size. The cache takes at most half of an H200's memory.
std::vector<GpuCase> decode_grid(Heads heads, int32_t page_size) {
  std::vector<GpuCase> cases;
  for (const int32_t batch : {1, 8, 32, 128}) {
    for (const int32_t length : {1, 4, 16, 64}) {
      if (batch * length * heads.kv > 128 * 64 * 8) continue;
      cases.push_back(decode(batch, length * kKilo, heads, page_size));
    }
  }
  return cases;
}

std::vector<GpuCase> mla_table() {
  std::vector<GpuCase> cases;
  for (const int32_t batch : {1, 8, 32, 64, 128}) {
    for (const int32_t length : {1, 4, 16, 64}) {
      if (batch == 64 && length == 64) continue;
      cases.push_back(mla_decode(128, 1, batch, length * kKilo));
    }
  }
  append(cases, {mla_decode(128, 2, 32, 4 * kKilo), mla_decode(128, 2, 128, 4 * kKilo),
                 mla_decode(128, 2, 128, 16 * kKilo)});
  for (const auto& [batch, length] :
       {std::pair{1, 1}, {1, 16}, {8, 4}, {32, 1}, {32, 4}, {128, 1}, {128, 16}}) {
    cases.push_back(mla_decode(16, 1, batch, length * kKilo));
  }
  append(cases, {mla_decode(32, 1, 8, 4 * kKilo), mla_decode(32, 1, 32, 4 * kKilo),
                 mla_decode(16, 2, 32, 4 * kKilo)});
  for (const int32_t heads : {128, 16})
    cases.push_back(log_uniform(mla_decode(heads, 1, 1, kKilo)));
  append(cases, {fp8_rows(mla_decode(128, 1, 32, 16 * kKilo)),
                 fp8_rows(mla_decode(16, 1, 128, 16 * kKilo))});
  for (const auto& [heads, batch, tokens] :
       {std::tuple{128, 4, 4}, {128, 1, 16}, {16, 8, 2}, {16, 1, 16}}) {
    append(cases, {mla_prefill(heads, batch, tokens * kKilo),
                   mla_extend(heads, batch, tokens * kKilo, 0)});
  }
  append(cases, {mla_extend(16, 8, 64, 8 * kKilo), mla_extend(128, 1, 2 * kKilo, 14 * kKilo)});
  for (const int32_t heads : {128, 16}) {
    const auto work = [&](int32_t batch, int32_t tokens, int32_t context) {
      return mla_extend(heads, batch, tokens, context * kKilo);
    };
    append(cases,
           {work(8, 512, 8), work(1, 64, 0), work(1, 512, 0), work(1, 2048, 0), work(1, 256, 4),
            work(1, 512, 16), with_decodes(work(1, 512, 0), 32, 4096),
            with_decodes(work(1, 2048, 14), 32, 4096), with_decodes(work(4, 512, 8), 32, 4096),
            with_decodes(work(1, 2048, 0), 128, 4096)});
  }
  const std::vector<std::array<int32_t, 3>> projected = {
      {128, 1, 1}, {128, 8, 4}, {128, 32, 4}, {128, 128, 4}, {16, 1, 1},  {64, 64, 1},
      {32, 64, 4}, {16, 32, 4}, {16, 64, 4},  {16, 128, 1},  {16, 256, 1}};
  for (const auto& [heads, batch, length] : projected) {
    cases.push_back(projected_decode(heads, batch, length * kKilo));
  }
  for (const int32_t page_size : {1, 16, 128}) {
    append(cases, {mla_decode(128, 1, 8, 4 * kKilo, page_size),
                   mla_decode(128, 1, 32, 4 * kKilo, page_size)});
  }
  return cases;
}

}  // namespace

std::vector<GpuCase> gpu_cases(GpuSuite suite) {
  if (suite == GpuSuite::quick) return quick_cases();
  std::vector<GpuCase> cases = prefill_table();
  append(cases, decode_grid(kGrouped, 64));
  for (const auto& [batch, length] : {std::pair{8, 16}, {32, 4}, {32, 16}, {128, 1}, {128, 4}}) {
    cases.push_back(decode(batch, length * kKilo, kGrouped, 64, DType::f8e4m3));
  }
  cases.push_back(decode(256, 4 * kKilo));  // shows the cost of planning many requests
  for (const int32_t page_size : {1, 16, 64})
    cases.push_back(log_uniform(decode(1, kKilo, kGrouped, page_size)));
  append(cases, mixed());
  append(cases, shared(64, 16 * kKilo, 512));
  append(cases, shared(8, 4 * kKilo, 512));
  append(cases, shared(256, kKilo, 512));
  append(cases, {invariant(prefill(16, kKilo)), invariant(prefill(4, 4 * kKilo)),
                 invariant(extend(64)), invariant(decode(1, kKilo)),
                 invariant(decode(1, 4 * kKilo)), invariant(decode(1, 16 * kKilo)),
                 invariant(decode(8, 4 * kKilo)), invariant(decode(32, 4 * kKilo)),
                 invariant(decode(128, kKilo)), invariant(log_uniform(decode(1, kKilo)))});
  append(cases, mla_table());
  if (suite == GpuSuite::full) {
    append(cases, feature_cases());
    append(cases, few_new_tokens());
    for (const Heads heads : {kGrouped, kWide, kEqual}) {
      for (const int32_t page_size : {1, 16, 64}) {
        if (heads.q == kGrouped.q && heads.kv == kGrouped.kv && page_size == 64) continue;
        append(cases, decode_grid(heads, page_size));
      }
    }
  }
  return cases;
}

GpuCase gpu_case(const AttentionCase& config) {
  GpuCase made = mha(config.phase == "prefill" ? "prefill-causal" : config.phase,
                     {config.q_heads, config.kv_heads}, config.head_dim);
  made.spec.q_dtype = config.q_dtype;
  made.kv_dtype = config.kv_dtype;
  made.page_size = config.page_size;
  const int32_t q_len = config.phase == "prefill" ? config.kv_len : config.q_len;
  made.work = q_len == 1 ? fmt::format("{}x{}", config.batch, length_name(config.kv_len))
                         : fmt::format("{}x{} of {}", config.batch, length_name(q_len),
                                       length_name(config.kv_len));
  made.requests.assign(static_cast<size_t>(config.batch), {q_len, config.kv_len});
  return made;
}

}  // namespace fovea::bench
