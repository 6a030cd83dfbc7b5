// SPDX-License-Identifier: Apache-2.0
// Loads and describes the engine.
#include "fovea/engine.h"

#include "c/handles.h"
#include "c/specs.h"

namespace fovea::c {
namespace {

fovea_engine_options default_options() {
  const EngineOptions from;
  fovea_engine_options to{.struct_size = sizeof(fovea_engine_options)};
  to.kv_dtype = static_cast<fovea_dtype>(from.kv_dtype);
  to.kv_scale = static_cast<int32_t>(from.kv_scale);
  to.page_size = from.page_size;
  to.max_requests = from.max_requests;
  to.kv_memory_bytes = from.kv_memory_bytes;
  to.max_batch_tokens = from.max_batch_tokens;
  to.max_mixed_tokens = from.max_mixed_tokens;
  to.max_context = from.max_context;
  to.threads = from.threads;
  to.prefix_cache = from.prefix_cache ? 1 : 0;
  to.batch_invariant = from.batch_invariant ? 1 : 0;
  to.cuda_graphs = from.cuda_graphs ? 1 : 0;
  to.max_graph_requests = from.max_graph_requests;
  to.prefix_levels = from.prefix_levels;
  to.min_prefix_savings = -1;
  to.workspace_budget = from.workspace_budget;
  to.overlap = from.overlap ? static_cast<int32_t>(*from.overlap) : -1;
  to.max_drafts = from.max_drafts;
  to.always_speculate = from.always_speculate ? 1 : 0;
  to.draft_branches = from.draft_branches;
  return to;
}

constexpr fovea_conversation kDefaultConversation = {.struct_size = sizeof(fovea_conversation),
                                                     .add_generation_prompt = 1};
constexpr fovea_engine_stats kDefaultStats = {.struct_size = sizeof(fovea_engine_stats)};

EngineOptions to_options(const fovea_engine_options* options) {
  const fovea_engine_options from = read_struct(options, default_options(), "options");
  check_reserved(from.reserved, "options.reserved");
  EngineOptions to;
  to.model_path = need_text(from.model_path, "options.model_path");
  if (to_flag(from.has_random_weights, "has_random_weights"))
    to.random_weights = from.random_weights;
  if (from.device != nullptr) to.device = from.device;
  if (from.backend != nullptr) to.backend = parse_backend_wish(from.backend);
  if (from.decode_backend != nullptr) to.decode_backend = parse_backend_wish(from.decode_backend);
  to.kv_dtype = to_enum(from.kv_dtype, DType::u8, "kv_dtype");
  to.kv_scale = to_enum(from.kv_scale, KvScale::per_token_head, "kv_scale");
  to.page_size = from.page_size;
  to.max_requests = from.max_requests;
  to.kv_memory_bytes = from.kv_memory_bytes;
  to.max_batch_tokens = from.max_batch_tokens;
  to.max_mixed_tokens = from.max_mixed_tokens;
  to.max_context = from.max_context;
  to.threads = from.threads;
  to.prefix_cache = to_flag(from.prefix_cache, "prefix_cache");
  to.batch_invariant = to_flag(from.batch_invariant, "batch_invariant");
  to.cuda_graphs = to_flag(from.cuda_graphs, "cuda_graphs");
  to.max_graph_requests = from.max_graph_requests;
  to.prefix_levels = from.prefix_levels;
  if (from.min_prefix_savings != -1) to.min_prefix_savings = from.min_prefix_savings;
  to.workspace_budget = from.workspace_budget;
  if (from.overlap != -1) to.overlap = to_flag(from.overlap, "overlap");
  if (from.speculate != nullptr) to.speculate = from.speculate;
  to.max_drafts = from.max_drafts;
  to.always_speculate = to_flag(from.always_speculate, "always_speculate");
  to.draft_branches = from.draft_branches;
  return to;
}

Conversation to_conversation(const fovea_conversation* conversation) {
  const fovea_conversation from = read_struct(conversation, kDefaultConversation, "conversation");
  check_reserved(from.reserved, "conversation.reserved");
  Conversation to{.messages = std::string(need_text(from.messages, "conversation.messages"))};
  to.tools = text_or_empty(from.tools);
  to.variables = text_or_empty(from.variables);
  to.add_generation_prompt =
      to_flag(from.add_generation_prompt, "conversation.add_generation_prompt");
  to.continue_last_message =
      to_flag(from.continue_last_message, "conversation.continue_last_message");
  return to;
}

fovea_engine_stats to_stats(const Engine& engine) {
  const EngineStats& from = engine.stats();
  fovea_engine_stats to = kDefaultStats;
  to.vocabulary = engine.vocabulary();
  to.max_context = engine.max_context();
  to.wanted_context = engine.wanted_context();
  to.has_text = engine.has_text() ? 1 : 0;
  to.graphs = from.graphs.count();
  to.steps = from.steps;
  to.prefill_tokens = from.prefill_tokens;
  to.decode_tokens = from.decode_tokens;
  to.prefill_seconds = from.prefill_seconds;
  to.decode_seconds = from.decode_seconds;
  to.shared_steps = from.shared_steps;
  to.prefix_queries = from.prefix_queries;
  to.prefix_hits = from.prefix_hits;
  to.preemptions = from.preemptions;
  to.kv_pages = from.kv_pages;
  to.kv_pages_free = from.kv_pages_free;
  to.memory_bytes = from.memory.total();
  to.draft_steps = from.draft_steps;
  to.draft_requests = from.draft_requests;
  to.drafts = from.drafts;
  to.accepted_drafts = from.accepted_drafts;
  to.speculation_gain = from.speculation_gain;
  return to;
}

const Engine& engine_of(const fovea_engine* engine) { return *need(engine, "engine").object; }

// Calls that run a pass must not come from a callback of one.
Engine& resting(fovea_engine* engine) {
  fovea_engine& given = need(engine, "engine");
  check(!given.running, "engine is calling back, this call must wait for the end of the step");
  return *given.object;
}

}  // namespace
}  // namespace fovea::c

using namespace fovea::c;  // NOLINT: the functions below are those of the C header

fovea_status fovea_engine_options_init(fovea_engine_options* options, size_t struct_size) {
  return init_struct(options, struct_size, default_options(), "options");
}

fovea_status fovea_engine_load(const fovea_engine_options* options, fovea_engine** engine) {
  return guarded([&] {
    clear_handle(engine, "engine");
    auto made = std::make_unique<fovea_engine>();
    made->object = fovea::Engine::load(to_options(options));
    give_handle(std::move(made), engine);
  });
}

fovea_status fovea_engine_destroy(fovea_engine* engine) {
  return guarded([&] {
    if (engine == nullptr) return;
    resting(engine);
    delete engine;
  });
}

fovea_status fovea_engine_plan(const fovea_engine_options* options, const fovea_device_info* device,
                               char* text, size_t* bytes) {
  return guarded([&] {
    std::optional<fovea::DeviceInfo> other;
    if (device != nullptr) other = to_device_info(device);
    give_text(fovea::Engine::plan(to_options(options), other).explain(), text, bytes);
  });
}

fovea_status fovea_engine_encode(const fovea_engine* engine, const char* text, int32_t* tokens,
                                 size_t* count) {
  return guarded([&] {
    const auto encoded = engine_of(engine).encode(need_text(text, "text"));
    give_array<int32_t>(encoded, tokens, count, "tokens");
  });
}

fovea_status fovea_engine_encode_chat(const fovea_engine* engine, const char* user,
                                      const char* system, int32_t* tokens, size_t* count) {
  return guarded([&] {
    fovea::ChatPrompt prompt{.user = std::string(need_text(user, "user"))};
    if (system != nullptr) prompt.system = system;
    give_array<int32_t>(engine_of(engine).encode_chat(prompt), tokens, count, "tokens");
  });
}

fovea_status fovea_conversation_init(fovea_conversation* conversation, size_t struct_size) {
  return init_struct(conversation, struct_size, kDefaultConversation, "conversation");
}

fovea_status fovea_engine_encode_conversation(const fovea_engine* engine,
                                              const fovea_conversation* conversation,
                                              int32_t* tokens, size_t* count) {
  return guarded([&] {
    const auto encoded = engine_of(engine).encode_conversation(to_conversation(conversation));
    give_array<int32_t>(encoded, tokens, count, "tokens");
  });
}

fovea_status fovea_engine_decode(const fovea_engine* engine, const int32_t* tokens, size_t count,
                                 char* text, size_t* bytes) {
  return guarded(
      [&] { give_text(engine_of(engine).decode(entries(tokens, count, "tokens")), text, bytes); });
}

fovea_status fovea_engine_logits(fovea_engine* engine, const int32_t* tokens, size_t count,
                                 float* logits, size_t* size) {
  return guarded([&] {
    fovea::Engine& given = resting(engine);
    const auto sequence = entries(tokens, count, "tokens");
    const size_t needed = count * static_cast<size_t>(given.vocabulary());
    check(count <= SIZE_MAX / static_cast<size_t>(given.vocabulary()), "count is {}", count);
    give_size(needed, logits, size, "logits");
    if (logits == nullptr) return;
    const std::vector<float> values = given.logits(sequence);
    std::memcpy(logits, values.data(), std::min(needed, values.size()) * sizeof(float));
  });
}

fovea_status fovea_engine_clear_prefix_cache(fovea_engine* engine) {
  return guarded([&] { resting(engine).clear_prefix_cache(); });
}

fovea_status fovea_engine_stats_init(fovea_engine_stats* stats, size_t struct_size) {
  return init_struct(stats, struct_size, kDefaultStats, "stats");
}

fovea_status fovea_engine_get_stats(const fovea_engine* engine, fovea_engine_stats* stats) {
  return guarded([&] { write_struct(stats, to_stats(engine_of(engine)), "stats"); });
}

fovea_status fovea_engine_explain(const fovea_engine* engine, char* text, size_t* bytes) {
  return guarded([&] { give_text(engine_of(engine).explain(), text, bytes); });
}

fovea_status fovea_engine_notes(const fovea_engine* engine, char* text, size_t* bytes) {
  return guarded([&] {
    std::string lines;
    for (const std::string& note : engine_of(engine).notes()) lines += note + "\n";
    give_text(lines, text, bytes);
  });
}

fovea_status fovea_engine_selection(const fovea_engine* engine, size_t group, int32_t decode,
                                    fovea_selection** selection) {
  return guarded([&] {
    clear_handle(selection, "selection");
    const auto groups = engine_of(engine).selections();
    check(group < groups.size(), "group is {}, the engine has {}", group, groups.size());
    const fovea::GroupSelection& given = groups[group];
    auto made = std::make_unique<fovea_selection>();
    made->owner = engine->object;
    made->request = given.request;
    const bool own = to_flag(decode, "decode") && given.decode.has_value();
    made->object = own ? *given.decode : given.prefill;
    give_handle(std::move(made), selection);
  });
}
