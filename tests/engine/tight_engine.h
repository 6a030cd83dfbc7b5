// SPDX-License-Identifier: Apache-2.0
// Engines with room for all requests and for little more than one, and prompts that share
// beginnings.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/load_engine.h"
#include "engine/reference_text.h"
#include "fovea/engine.h"
#include "fovea/error.h"

namespace fovea::churn {

inline constexpr int32_t kPageSize = 16;
inline constexpr int32_t kContext = 112;
inline constexpr int32_t kNewTokens = 8;

inline EngineOptions roomy_options(const std::string& model) {
  EngineOptions options;
  options.model_path = model_folder(model);
  options.page_size = kPageSize;
  options.kv_memory_bytes = size_t{64} << 20;
  options.max_context = kContext;
  options.max_requests = 4;
  options.max_batch_tokens = 48;
  options.threads = 1;
  options.prefix_cache = false;
  return options;
}

enum class Passes {
  one_by_one,
  overlapped,   // the next one is enqueued before the tokens of one are known
  speculative,  // decodes verify drafts
  drawn,        // likewise, and the runner draws tokens, as on a GPU
  eagle,        // drafts of a head on the model
  eagle_drawn,  // likewise, and both runners draw tokens
  trees,        // trees of drafts, of a head or of a draft model
};

inline bool has_head(Passes passes) {
  return passes == Passes::eagle || passes == Passes::eagle_drawn;
}

inline bool verifies(Passes passes) {
  return passes == Passes::speculative || passes == Passes::drawn || has_head(passes) ||
         passes == Passes::trees;
}

inline std::string name_of(const std::string& model, Passes passes) {
  return model + (passes == Passes::overlapped    ? "_overlapped"
                  : passes == Passes::speculative ? "_speculative"
                  : passes == Passes::drawn       ? "_drawn"
                  : passes == Passes::eagle       ? "_eagle"
                  : passes == Passes::eagle_drawn ? "_eagle_drawn"
                  : passes == Passes::trees       ? "_trees"
                                                  : "");
}

inline bool has_states(const std::string& model) {
  return model == "qwen3_next" || model == "kimi_linear" || model.starts_with("mamba") ||
         model.starts_with("granitemoehybrid") || model.starts_with("lfm2");
}

// Goldens, whose weights are random, write in so few tokens that n-grams are often right.
inline constexpr int32_t kFirstToken = 3, kFewTokens = 3;

// Returns tokens to make prompts of. Goldens have no text, so theirs are random.
inline std::vector<int32_t> text_of(const std::string& model) {
  if (!is_golden(model)) return values_of<int32_t>(reference_file(model), "validation.input_ids");
  std::mt19937 random(5);
  std::vector<int32_t> text(8192);
  for (int32_t& token : text) token = kFirstToken + static_cast<int32_t>(random() % kFewTokens);
  return text;
}

// Returns the head that was trained for the model of testdata.
inline std::string head_of(const std::string& model) {
  return FOVEA_SOURCE_DIR "/testdata/drafts/" + model + (model == "llama" ? "_eagle" : "_mtp");
}

// Returns memory of which, with linear layers, four states serve four requests and all snapshots,
// at 230 KB each next to pages of 32 KB. With drafts there are pages for all requests, which must
// leave slots to snapshots. States of LFM2 have 5 KB, its pages 8.
inline size_t memory_with_states(const std::string& model, Passes passes) {
  if (model.starts_with("lfm2")) return verifies(passes) ? 300'000 : 160'000;
  return verifies(passes) ? 5'500'000 : 2'100'000;
}

// Makes an engine whose full pools hold 1.2 times the longest request.
inline std::unique_ptr<Engine> tight_engine(const std::string& model, Passes passes,
                                            bool batch_invariant = false) {
  constexpr int64_t kPages = kContext / kPageSize * 12 / 10;
  EngineOptions options = roomy_options(model);
  options.prefix_cache = true;
  options.max_mixed_tokens = 20;
  options.overlap = passes == Passes::overlapped;
  if (verifies(passes)) {
    options.speculate = has_head(passes) ? "eagle:" + head_of(model) : "ngram";
    if (passes == Passes::trees) {
      const bool head = model == "llama" || model == "deepseek_v3";
      options.speculate = head ? "eagle:" + head_of(model) : "draft:" + model_folder("llama");
      options.draft_branches = 3;
    }
    options.max_drafts = 5;
    options.always_speculate = true;
  }
  options.batch_invariant = batch_invariant;
  const bool runner_draws = passes == Passes::drawn || passes == Passes::eagle_drawn;
  if (has_states(model)) {
    options.kv_memory_bytes = memory_with_states(model, passes);
    return load_engine(options, {}, runner_draws);
  }
  size_t low = size_t{64} << 10, high = options.kv_memory_bytes;
  while (low + 1024 < high) {
    options.kv_memory_bytes = low + (high - low) / 2;
    bool fits = false;
    try {
      fits = Engine::load(options)->stats().kv_pages >= kPages;
    } catch (const Error&) {
    }
    (fits ? high : low) = options.kv_memory_bytes;
  }
  options.kv_memory_bytes = high;
  return load_engine(options, {}, runner_draws);
}

// Makes a prompt with a shared beginning, which ends near a page boundary, and an end of its own.
inline std::vector<int32_t> random_prompt(const std::vector<int32_t>& text, std::mt19937& random) {
  const size_t base = random() % 3 * 2000;
  const size_t pages = 1 + random() % 4;
  const size_t shared = pages * kPageSize - 1 + random() % 3;
  const size_t own = 1 + random() % (kContext - kNewTokens - shared);
  std::vector<int32_t> tokens(text.begin() + static_cast<int64_t>(base),
                              text.begin() + static_cast<int64_t>(base + shared));
  const size_t from = random() % 8 * 500;
  tokens.insert(tokens.end(), text.begin() + static_cast<int64_t>(from),
                text.begin() + static_cast<int64_t>(from + own));
  return tokens;
}

}  // namespace fovea::churn
