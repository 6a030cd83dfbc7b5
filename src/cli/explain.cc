// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <charconv>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "cli/commands.h"
#include "cli/layer_widths.h"
#include "cli/ranks.h"
#include "fovea/error.h"
#include "fovea/gpu.h"
#include "fovea/select_backend.h"

namespace fovea::cli {
namespace {

// Prefix of the architecture of a described device.
constexpr std::string_view kArchitecture = "sm_";

struct ExplainFlags {
  std::optional<std::string> model;
  std::optional<uint64_t> random_weights;                // requires --model
  std::optional<std::string> kv_memory, decode_backend;  // require --model
  std::optional<std::string> workspace_budget;
  BackendRequest request;
  std::string backend = "auto", device = "cpu";
  int multiprocessors = 132;  // for a GPU given by its architecture; 132 is an H200's
  std::optional<std::string> dtype, kv_dtype;  // default from default_dtype()
  std::optional<std::string> kv_layout;        // default from the engine's rules
  ParallelOptions parallel;                    // requires --model
  std::string kind = "mha", scope = "decoder", mask = "none", scale = "none";
  bool json = false;

  // Returns the dtype that the backends of the device support.
  DType default_dtype() const { return device == "cpu" ? DType::f32 : DType::bf16; }
  DType cache_dtype() const {
    return kv_dtype ? parse_dtype_flag("--kv-dtype", *kv_dtype) : default_dtype();
  }
};

// Selection is a pure function of the device's description, so "sm_90" can describe a GPU of that
// architecture that this machine lacks.
DeviceInfo explained_device(const CLI::App& command, const ExplainFlags& flags) {
  const std::string& name = flags.device;
  if (!name.starts_with(kArchitecture)) {
    if (command.get_option("--multiprocessors")->count() > 0) {
      throw Error(ErrorCode::invalid_argument, "--multiprocessors needs --device sm_NN");
    }
    return find_device(name);
  }
  DeviceInfo device{.kind = DeviceKind::cuda, .name = name, .cores = flags.multiprocessors};
  const char* const end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kArchitecture.size(), end, device.sm);
  if (error == std::errc{} && rest == end && device.sm > 0) return device;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("--device is '{}', an architecture is spelled like sm_90", name));
}

template <typename T>
T named(std::string_view flag, const std::string& value, const std::map<std::string, T>& names) {
  const auto found = names.find(value);
  if (found != names.end()) return found->second;
  std::string known;
  for (const auto& [name, unused] : names) known += (known.empty() ? "" : ", ") + name;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} is '{}', known: {}", flag, value, known));
}

KvLayout layout_of(const ExplainFlags& flags) {
  if (flags.kv_layout) {
    return named<KvLayout>(
        "--kv-layout", *flags.kv_layout,
        {{"mha", KvLayout::mha}, {"mla", KvLayout::mla}, {"mla_fp8_rows", KvLayout::mla_fp8_rows}});
  }
  if (flags.request.spec.kind != AttentionKind::mla) return KvLayout::mha;
  return fits_mla_fp8_rows(flags.request.cache) ? KvLayout::mla_fp8_rows : KvLayout::mla;
}

void complete(const CLI::App& command, ExplainFlags& flags) {
  AttentionSpec& spec = flags.request.spec;
  KvCacheSpec& cache = flags.request.cache;
  using enum AttentionKind;
  using enum AttentionScope;
  spec.kind = named<AttentionKind>("--kind", flags.kind,
                                   {{"mha", mha},
                                    {"mla", mla},
                                    {"gated_delta_net", gated_delta_net},
                                    {"mamba2", mamba2},
                                    {"kda", kda},
                                    {"lightning", lightning},
                                    {"mamba1", mamba1},
                                    {"short_conv", short_conv}});
  spec.scope = named<AttentionScope>("--scope", flags.scope,
                                     {{"decoder", decoder},
                                      {"ragged", ragged},
                                      {"encoder", encoder},
                                      {"encoder_cache", encoder_cache},
                                      {"cross", cross}});
  spec.mask = named<MaskKind>("--mask", flags.mask,
                              {{"none", MaskKind::none},
                               {"tree", MaskKind::tree},
                               {"custom", MaskKind::custom},
                               {"prefix_spans", MaskKind::prefix_spans},
                               {"multi_item", MaskKind::multi_item}});
  cache.scale = parse_kv_scale_flag(flags.scale);
  spec.q_dtype = flags.dtype ? parse_dtype_flag("--dtype", *flags.dtype) : flags.default_dtype();
  cache.dtype = flags.cache_dtype();
  place_widths(spec);
  BatchLimits& limits = flags.request.limits;
  if (spec.scope == cross && limits.max_encoder_len == 0)
    limits.max_encoder_len = limits.max_kv_len;
  cache.layers = 1;
  cache.kv_heads = spec.kv_heads;
  cache.head_dim = cached_key_dim(spec);
  cache.head_dim_v = cached_value_dim(spec);
  cache.layout = layout_of(flags);
  flags.request.device = explained_device(command, flags);
}

nlohmann::ordered_json to_json(const Selection& selection) {
  nlohmann::ordered_json report{
      {"chosen", selection.chosen->name}, {"asked", selection.asked},
      {"fallback", selection.fallback},   {"workspace_bytes", selection.workspace_bytes},
      {"notes", selection.notes},         {"candidates", nlohmann::ordered_json::array()}};
  for (const Candidate& candidate : selection.candidates) {
    nlohmann::ordered_json reasons = nlohmann::ordered_json::array();
    for (const Reason& reason : candidate.reasons) {
      reasons.push_back({{"code", reject_code_name(reason.code)}, {"text", reason.text}});
    }
    report["candidates"].push_back({{"name", candidate.name}, {"reasons", std::move(reasons)}});
  }
  return report;
}

nlohmann::ordered_json to_json(const EngineMemory& memory) {
  return {{"weights", memory.weights},
          {"caches", memory.caches},
          {"activations", memory.activations},
          {"positions", memory.positions},
          {"attention", memory.attention},
          {"logits", memory.logits},
          {"products", memory.products},
          {"batch", memory.batch},
          {"total", memory.total()}};
}

void explain_model(const CLI::App& command, const ExplainFlags& flags) {
  EngineOptions options;
  options.model_path = *flags.model;
  options.random_weights = flags.random_weights;
  options.backend = parse_backend_wish(flags.backend);
  if (flags.decode_backend) options.decode_backend = parse_backend_wish(*flags.decode_backend);
  std::optional<DeviceInfo> elsewhere;
  if (flags.device.starts_with(kArchitecture)) {
    elsewhere = explained_device(command, flags);
    if (!flags.kv_memory) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("--device {} with --model needs --kv-memory: by default caches take "
                              "half of the device's free memory, which is unknown",
                              flags.device));
    }
  } else {
    options.device = flags.device;
  }
  options.workspace_budget = flags.request.limits.workspace_budget;
  if (flags.kv_memory) options.kv_memory_bytes = parse_size_flag("--kv-memory", *flags.kv_memory);
  options.kv_dtype = flags.cache_dtype();
  options.kv_scale = parse_kv_scale_flag(flags.scale);
  options.page_size = flags.request.cache.page_size;
  const BatchLimits& limits = flags.request.limits;
  const auto take = [&](const char* flag, int32_t value, int32_t& option) {
    if (command.get_option(flag)->count() > 0) option = value;
  };
  take("--prefix-levels", limits.prefix_levels, options.prefix_levels);
  take("--max-requests", limits.max_requests, options.max_requests);
  take("--max-tokens", limits.max_tokens, options.max_batch_tokens);
  take("--max-kv-len", limits.max_kv_len, options.max_context);
  options.batch_invariant = flags.request.spec.batch_invariant;
  const EnginePlan plan = plan_parallel_engine(options, flags.parallel, elsewhere);
  const int32_t ranks = flags.parallel.tensor_parallel;
  if (!flags.json) {
    if (ranks > 1) fmt::print("each of {} ranks has:\n", ranks);
    fmt::print("{}", plan.explain());
    return;
  }
  nlohmann::ordered_json groups = nlohmann::ordered_json::array();
  for (const GroupSelection& group : plan.selections) {
    nlohmann::ordered_json entry = to_json(group.prefill);
    entry["layers"] = group.layers;
    if (group.decode) entry["decode"] = to_json(*group.decode);
    if (group.trees) entry["trees"] = to_json(*group.trees);
    if (!group.why_no_graphs.empty()) entry["why_no_graphs"] = group.why_no_graphs;
    groups.push_back(std::move(entry));
  }
  const nlohmann::ordered_json report{{"ranks", ranks},
                                      {"groups", std::move(groups)},
                                      {"memory", to_json(plan.memory)},
                                      {"max_context", plan.max_context},
                                      {"wanted_context", plan.wanted_context}};
  fmt::print("{}\n", report.dump(2));
}

// A flag that contradicts --model is an error.
void check_model_flags(const CLI::App& command) {
  const std::string accepted =
      " --help --model --backend --decode-backend --device --kv-dtype --kv-scale --page-size "
      "--batch-invariant "
      "--prefix-levels --max-requests --max-tokens --max-kv-len --json --random-weights "
      "--kv-memory "
      "--tp --dcp --multiprocessors --workspace-budget ";
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() == 0) continue;
    const std::string name = option->get_lnames().front();
    if (accepted.find(" --" + name + " ") != accepted.npos) continue;
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("--{} does not go with --model: layers are the model's, batches the engine's",
                    name));
  }
}

void run(const CLI::App& command, ExplainFlags& flags) {
  if (flags.workspace_budget) {
    flags.request.limits.workspace_budget = parse_workspace_budget(*flags.workspace_budget);
  }
  if (flags.model) {
    check_model_flags(command);
    explain_model(command, flags);
    return;
  }
  for (const char* option :
       {"--decode-backend", "--random-weights", "--kv-memory", "--tp", "--dcp"}) {
    if (command.get_option(option)->count() == 0) continue;
    throw Error(ErrorCode::invalid_argument, fmt::format("{} needs --model", option));
  }
  set_default_widths(command, flags.kind, flags.request.spec);
  complete(command, flags);
  const BackendRegistry registry = BackendRegistry::builtin();
  const Selection selection =
      select_backend(registry, flags.request, parse_backend_wish(flags.backend));
  if (flags.json) {
    fmt::print("{}\n", to_json(selection).dump(2));
  } else {
    fmt::print("{}", selection.explain());
  }
}

void add_layer_flags(CLI::App& command, ExplainFlags& flags) {
  AttentionSpec& spec = flags.request.spec;
  spec.q_heads = 32;
  spec.kv_heads = 8;
  spec.head_dim = 128;
  command
      .add_option(
          "--kind", flags.kind,
          "mha, mla, gated_delta_net, mamba1, mamba2, kda, lightning or short_conv; the default "
          "heads of mla are DeepSeek-V3's, of mamba1 Falcon Mamba's, of short_conv LFM2's, of the "
          "other linear kinds Qwen3-Next's")
      ->capture_default_str();
  command.add_option("--scope", flags.scope, "decoder, ragged, encoder, encoder_cache or cross")
      ->capture_default_str();
  command.add_option("--mask", flags.mask, "none, tree, custom, prefix_spans or multi_item")
      ->capture_default_str();
  command.add_option("--q-heads", spec.q_heads, "heads of q; linear kinds: key heads")
      ->capture_default_str();
  command.add_option("--kv-heads", spec.kv_heads, "heads of k and v; linear kinds: value heads")
      ->capture_default_str();
  command.add_option("--head-dim", spec.head_dim, "mla: latent and rotary part together")
      ->capture_default_str();
  command.add_option("--head-dim-v", spec.head_dim_v, "default --head-dim; mla: the latent");
  command.add_option("--nope-dim", spec.mla.nope_dim,
                     "mla: dims of a head of q before absorption, 0 for absorbed queries");
  command.add_option("--v-dim", spec.mla.v_dim,
                     "mla: dims of a head of the result; used with --nope-dim");
  command.add_option("--conv-width", spec.linear.conv_width,
                     "linear kinds: taps of the causal convolution, 0 for none");
  command.add_option("--scale", spec.scores.softmax_scale,
                     "factor of the scores, 0 for 1/sqrt(head_dim)");
  command.add_option("--dtype", flags.dtype,
                     "dtype of q, new k and v, and out; default fp32, on a GPU bf16");
  command.add_option("--window", spec.window,
                     "number of preceding keys that a query sees, itself included; 0 is off");
  command.add_option("--chunk", spec.chunk, "a query sees keys of its own aligned chunk; 0 is off");
  command.add_option("--dual-chunk", spec.dual_chunk.chunk_size,
                     "chunk_size of dual chunk attention; 0 is off");
  command.add_option("--dual-local", spec.dual_chunk.local_size,
                     "local_size of dual chunk attention, below its chunk_size");
  command.add_option("--logit-cap", spec.scores.logit_cap, "s = cap * tanh(s / cap); 0 is off");
  command.add_flag("--sinks", spec.scores.has_sinks, "an extra logit per head in the denominator");
  command.add_flag("--alibi", spec.scores.has_alibi, "a slope per head on the distance of keys");
  command.add_flag("--rope", spec.has_rope, "q and k arrive without positions");
  command.add_flag("--lse", spec.needs_lse, "the caller reads the log-sum-exp");
  command.add_flag("--batch-invariant", spec.batch_invariant,
                   "make a row's bits independent of the rest of the batch");
}

void add_cache_flags(CLI::App& command, ExplainFlags& flags) {
  KvCacheSpec& cache = flags.request.cache;
  cache.page_size = 16;
  command.add_option("--kv-dtype", flags.kv_dtype, "default fp32, on a GPU bf16");
  command.add_option("--kv-scale", flags.scale, "none, per_tensor, per_head or per_token_head")
      ->capture_default_str();
  command.add_option("--page-size", cache.page_size, "tokens of a page")->capture_default_str();
  command.add_option(
      "--kv-layout", flags.kv_layout,
      "mha, mla or mla_fp8_rows; default: the engine's choice, which is mla_fp8_rows for "
      "e4m3 latents of 512 + 64 without another scale");
  command.add_option("--kv-window", cache.window,
                     "number of last tokens that the pool keeps, 0 for all");
}

void add_limit_flags(CLI::App& command, BatchLimits& limits) {
  limits = {.max_requests = 32, .max_tokens = 512, .max_q_len = 512, .max_kv_len = 8192};
  command.add_option("--max-requests", limits.max_requests, "requests of a batch")
      ->capture_default_str();
  command.add_option("--max-tokens", limits.max_tokens, "new tokens of a batch")
      ->capture_default_str();
  command.add_option("--max-q-len", limits.max_q_len, "new tokens of a request")
      ->capture_default_str();
  command.add_option("--max-kv-len", limits.max_kv_len, "tokens of a request")
      ->capture_default_str();
  command.add_option("--max-encoder-len", limits.max_encoder_len,
                     "encoder tokens of a request, scope cross; default --max-kv-len");
  command.add_option("--prefix-levels", limits.prefix_levels,
                     "max levels of shared prefixes; 0 is off, the default with --model is 2");
}

}  // namespace

void add_explain(CLI::App& program) {
  auto flags = std::make_shared<ExplainFlags>();
  CLI::App* command = program.add_subcommand(
      "explain", "show the backend that would be selected, and all reasons against the others");
  CLI::Validator positive = CLI::Range(1, 1 << 16);
  positive.description("");  // hides the range in the help
  command->add_option("--model", flags->model, "explain the layer groups of a checkpoint instead");
  add_random_weights(*command, flags->random_weights);
  add_tensor_parallel(*command, flags->parallel);
  command->add_option(
      "--kv-memory", flags->kv_memory,
      "with --model: budget of all caches; default half of the device's free memory");
  command->add_option("--backend", flags->backend, "auto, NAME, or prefer:NAME")
      ->capture_default_str();
  command->add_option("--decode-backend", flags->decode_backend,
                      "with --model: another backend for decode steps");
  command
      ->add_option("--device", flags->device,
                   "cpu, cuda, cuda:N, or sm_NN for any GPU of that architecture")
      ->capture_default_str();
  command
      ->add_option("--multiprocessors", flags->multiprocessors,
                   "multiprocessors of the GPU of --device sm_NN")
      ->capture_default_str()
      ->check(positive);
  add_layer_flags(*command, *flags);
  add_cache_flags(*command, *flags);
  add_limit_flags(*command, flags->request.limits);
  add_workspace_budget(*command, flags->workspace_budget);
  command->add_flag("--json", flags->json, "print the selection and all reasons as JSON");
  command->callback([command, flags] { run(*command, *flags); });
}

}  // namespace fovea::cli
