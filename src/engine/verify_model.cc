// SPDX-License-Identifier: Apache-2.0
#include "fovea/verify_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "core/check.h"
#include "fovea/error.h"
#include "fovea/gpu.h"
#include "model/model.h"
#include "model/safetensors.h"

namespace fovea {
namespace {

struct ReferencePrompt {
  std::vector<int32_t> tokens;
  std::vector<int32_t> greedy;
  std::vector<float> last_logits;
};

struct Reference {
  std::vector<ReferencePrompt> prompts;
  std::vector<int32_t> validation;
  int64_t window = 0;
  double perplexity = 0;
};

template <typename T>
std::vector<T> read_tensor(const SafetensorsFile& file, const std::string& path,
                           const std::string& name, DType dtype) {
  const auto found = file.tensors().find(name);
  if (found == file.tensors().end()) fail(ErrorCode::corrupt_file, "{}: no tensor {}", path, name);
  const StoredTensor& tensor = found->second;
  if (tensor.dtype != dtype) {
    fail(ErrorCode::corrupt_file, "{}: {} is {}, expected {}", path, name, dtype_name(tensor.dtype),
         dtype_name(dtype));
  }
  std::vector<T> values(tensor.bytes / sizeof(T));
  std::memcpy(values.data(), tensor.data, values.size() * sizeof(T));
  return values;
}

Reference read_reference(const std::string& folder) {
  const std::string path = folder + "/reference.safetensors";
  const SafetensorsFile file = SafetensorsFile::open(path);
  Reference reference;
  for (int k = 0; file.tensors().contains(fmt::format("prompt_{}.input_ids", k)); ++k) {
    const std::string prefix = fmt::format("prompt_{}.", k);
    reference.prompts.push_back(
        {.tokens = read_tensor<int32_t>(file, path, prefix + "input_ids", DType::i32),
         .greedy = read_tensor<int32_t>(file, path, prefix + "greedy_64", DType::i32),
         .last_logits = read_tensor<float>(file, path, prefix + "last_logits", DType::f32)});
  }
  if (reference.prompts.empty()) fail(ErrorCode::corrupt_file, "{}: no prompt_0.input_ids", path);
  reference.validation = read_tensor<int32_t>(file, path, "validation.input_ids", DType::i32);
  const JsonObject json = JsonObject::open(folder + "/reference.json").object("validation");
  reference.window = json.integer("tokens_per_window", 2, 1 << 20);
  reference.perplexity = json.number("perplexity", 1, 1e9);
  return reference;
}

double negative_log_likelihood(std::span<const float> logits, int32_t token) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - largest));
  return std::log(sum) + largest - logits[static_cast<size_t>(token)];
}

double measure_perplexity(Engine& engine, const Reference& reference,
                          const std::function<void(std::string_view)>& progress) {
  const auto window = static_cast<size_t>(reference.window);
  const auto vocabulary = static_cast<size_t>(engine.vocabulary());
  const size_t windows = reference.validation.size() / window;
  double total = 0;
  for (size_t w = 0; w < windows; ++w) {
    if (progress) progress(fmt::format("perplexity: window {} of {}", w + 1, windows));
    const std::span tokens = std::span(reference.validation).subspan(w * window, window);
    const std::vector<float> logits = engine.logits(tokens);
    for (size_t t = 0; t + 1 < window; ++t) {
      total += negative_log_likelihood(std::span(logits).subspan(t * vocabulary, vocabulary),
                                       tokens[t + 1]);
    }
  }
  return std::exp(total / static_cast<double>(windows * (window - 1)));
}

void check_prompts(Engine& engine, const Reference& reference, VerifyRow& row,
                   const std::function<void(std::string_view)>& progress) {
  const auto vocabulary = static_cast<size_t>(engine.vocabulary());
  std::vector<GenerateRequest> requests;
  for (const ReferencePrompt& prompt : reference.prompts) {
    if (progress) progress(fmt::format("logits of a prompt of {} tokens", prompt.tokens.size()));
    const std::vector<float> logits = engine.logits(prompt.tokens);
    const float* last = logits.data() + logits.size() - vocabulary;
    if (prompt.last_logits.size() != vocabulary) {
      fail(ErrorCode::corrupt_file, "the reference has {} logits a token, the model {}",
           prompt.last_logits.size(), vocabulary);
    }
    for (size_t v = 0; v < vocabulary; ++v) {
      const float difference = std::fabs(last[v] - prompt.last_logits[v]);
      // The negated comparison counts a NaN as infinitely far.
      if (!(difference <= row.max_logit_difference)) {
        row.max_logit_difference =
            std::isnan(difference) ? std::numeric_limits<float>::infinity() : difference;
      }
    }
    GenerateRequest request;
    request.tokens = prompt.tokens;
    request.sampling.max_new_tokens = static_cast<int32_t>(prompt.greedy.size());
    request.sampling.ignore_eos = true;
    requests.push_back(std::move(request));
  }
  if (progress) progress("greedy tokens of all prompts in one batch");
  const std::vector<GenerateResult> results = engine.generate(requests);
  for (size_t k = 0; k < results.size(); ++k) {
    const std::vector<int32_t>& expected = reference.prompts[k].greedy;
    const std::vector<int32_t>& tokens = results[k].tokens;
    const auto differs =
        std::mismatch(expected.begin(), expected.end(), tokens.begin(), tokens.end());
    row.greedy_equal += static_cast<int32_t>(differs.first - expected.begin());
    row.greedy_total += static_cast<int32_t>(expected.size());
  }
}

VerifyRow check_combination(const VerifyOptions& options, const std::string& backend,
                            DType kv_dtype, const Reference& reference) {
  VerifyRow row;
  row.backend = backend;
  row.kv_dtype = kv_dtype;
  EngineOptions engine_options = options.engine;
  engine_options.backend = {Policy::require, backend};
  engine_options.kv_dtype = kv_dtype;
  std::unique_ptr<Engine> engine;
  try {
    engine = load_parallel_engine(engine_options, options.parallel);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    row.unsupported = error.what();
    return row;
  }
  const auto progress = [&](std::string_view what) {
    if (options.progress)
      options.progress(fmt::format("{} {}: {}", backend, dtype_name(kv_dtype), what));
  };
  check_prompts(*engine, reference, row, progress);
  if (options.perplexity) {
    row.perplexity = measure_perplexity(*engine, reference, progress);
    row.perplexity_change = row.perplexity / reference.perplexity - 1;
  }
  const VerifyLimits limits = verify_limits(kv_dtype);
  // Even a difference without a limit must be finite: NaN and infinities never pass.
  row.pass = std::isfinite(row.max_logit_difference) &&
             row.max_logit_difference <= limits.logit_difference &&
             (!limits.greedy_equal || row.greedy_equal == row.greedy_total) &&
             std::fabs(row.perplexity_change) <= limits.perplexity_change;
  return row;
}

}  // namespace

VerifyLimits verify_limits(DType kv_dtype) {
  constexpr float kNotJudged = std::numeric_limits<float>::infinity();
  if (kv_dtype == DType::f32) return {2e-3f, true, 1e-3};
  if (is_fp8(kv_dtype)) return {kNotJudged, false, 3e-2};
  return {kNotJudged, false, 1e-2};
}

std::vector<VerifyRow> verify_model(const VerifyOptions& options) {
  // A missing device or an unknown model is an error, not a refusal by a backend.
  (void)find_device(options.engine.device);
  const std::string& folder = options.engine.model_path;
  check_argument(!folder.empty(), "model_path is empty");
  find_model(read_config(folder), folder);
  const Reference reference = read_reference(folder);
  std::vector<std::string> backends = options.backends;
  if (backends.empty()) {
    const BackendRegistry builtin = BackendRegistry::builtin();
    const BackendRegistry& registry = options.engine.registry ? *options.engine.registry : builtin;
    for (const BackendEntry& entry : registry.entries()) backends.push_back(entry.name);
  }
  std::vector<VerifyRow> rows;
  std::set<std::string> refusals;
  for (const std::string& backend : backends) {
    std::vector<VerifyRow> of_backend;
    for (const DType kv_dtype : options.kv_dtypes) {
      of_backend.push_back(check_combination(options, backend, kv_dtype, reference));
      refusals.insert(of_backend.back().unsupported);
    }
    const bool runs = std::any_of(of_backend.begin(), of_backend.end(),
                                  [](const VerifyRow& row) { return row.unsupported.empty(); });
    if (runs || !options.backends.empty()) std::ranges::move(of_backend, std::back_inserter(rows));
  }
  // If all backends give the same reason, it is an error of the model.
  if (rows.empty() && refusals.size() == 1) fail(ErrorCode::unsupported, "{}", *refusals.begin());
  return rows;
}

}  // namespace fovea
