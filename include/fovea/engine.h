// SPDX-License-Identifier: Apache-2.0
// Text from a checkpoint: requests in, tokens out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/kv_cache.h"
#include "fovea/select_backend.h"

namespace fovea {

struct EngineOptions {
  // Folder with config.json, *.safetensors, and tokenizer.json or tokenizer.model.
  std::string model_path = {};
  // Weights made from this seed instead of read, in the dtype of the config (default bf16): equal
  // seeds give equal bits. model_path may then be a config.json or a folder that has nothing else.
  // A quantization_config, which describes files, is ignored.
  std::optional<uint64_t> random_weights = {};
  std::string device = "cpu";  // or "cuda", "cuda:N": weights, caches and activations live there
  // Backends the engine may choose from; null: BackendRegistry::builtin(). Must outlive the engine.
  const BackendRegistry* registry = nullptr;
  BackendWish backend = {};                        // for every layer group that softmax-attends
  std::optional<BackendWish> decode_backend = {};  // unset: as backend
  DType kv_dtype = DType::f32;                     // a GPU needs bf16 or fp8
  // Of an fp8 cache; none: per_token_head, and rows with scales of their own for latents of 512 +
  // 64 in e4m3 (KvLayout::mla_fp8_rows). Those of per_tensor and per_head stay 1.
  KvScale kv_scale = KvScale::none;
  int32_t page_size = 16;
  // For all pools together, never exceeded; 0: half of the device's free memory.
  size_t kv_memory_bytes = 0;
  int32_t max_requests = 32;       // running at once
  int32_t max_batch_tokens = 512;  // new tokens of one step; longer prompts are chunked
  // Tokens of one request, at most the model's and 2^22. 0: the model's, or less where
  // kv_memory_bytes holds less or longer contexts change the results of short ones (longrope: the
  // original length).
  int32_t max_context = 0;
  int threads = 0;  // 0: one per core
  bool prefix_cache = true;
  // A request's bits do not depend on its company, on chunks or on cached prefixes; on a GPU they
  // may on max_batch_tokens.
  bool batch_invariant = false;
  // On a GPU: replay decode steps of up to max_graph_requests requests instead of enqueueing their
  // kernels, where all backends allow it (GroupSelection::why_no_graphs). Captured at load for 1,
  // 2, 4 and the multiples of 8 requests, up to 8 also for short contexts; EngineStats says what
  // they take.
  bool cuda_graphs = true;
  int32_t max_graph_requests = 256;
  // Prefixes that the prefix cache gave to several requests are read once for all of them, in up to
  // prefix_levels levels (a system prompt, then a document; at most 4, 0: never), where a level
  // saves min_prefix_savings bytes of a layer's keys and values; unset: 1 MB, on a GPU 512 MB
  // (docs/kernels/cascade.md). Last bits may then depend on who shares.
  int32_t prefix_levels = 2;
  std::optional<int64_t> min_prefix_savings = {};
  // Bytes of workspace to which attention of a layer group keeps where it can: see BatchLimits.
  int64_t workspace_budget = BatchLimits{}.workspace_budget;
};

// Temperature, min_p, top_k and top_p apply in this order, each to what the one before has left.
// A draw depends on the seed, the token's position and the request's own logits only.
struct SamplingParams {
  int32_t max_new_tokens = 64;  // at least 1; the context may end a request earlier
  float temperature = 0;        // in [0, 100]; 0: greedy
  int32_t top_k = 0;            // 0: off
  float top_p = 1;              // in (0, 1]
  float min_p = 0;              // in [0, 1], relative to the most likely token
  uint64_t seed = 0;
  // Text at which generation ends, itself not part of the output: up to 64 strings of 1 to 1024
  // bytes of UTF-8. The text of special tokens, which is not part of the output either, counts.
  std::vector<std::string> stop = {};
  std::vector<int32_t> stop_tokens = {};  // up to 1024, without their text
  bool ignore_eos = false;
  // In [0, 20]: the natural log-probability of each token and of that many of the most likely ones,
  // by the unmodified logits; -1: off.
  int32_t logprobs = -1;
  bool prompt_logprobs = false;  // of the prompt's tokens too; the request reuses no prefix then
};

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
};

enum class FinishReason : uint8_t {
  none,
  stop,       // an end-of-sequence token, a stop token or a stop string
  length,     // max_new_tokens or the context
  cancelled,  // by cancel()
  failed,     // for a reason of this request alone, which TokenEvent::error tells
};

struct TokenEvent {
  int64_t request = 0;
  int32_t token = -1;  // -1: none in this event (the request ended otherwise)
  std::string text;    // text that became certain with this token; always whole UTF-8 characters
  // With SamplingParams::logprobs >= 0: the token's, and of the most likely ones, best first.
  float logprob = 0;
  std::vector<TokenLogprob> top;
  FinishReason finish = FinishReason::none;
  std::string error;  // with FinishReason::failed: why, in one line
  // In the event that ends the request.
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;  // of the prompt, served by the prefix cache
  // [prompt_tokens], first 0; with SamplingParams::prompt_logprobs, empty without a token.
  std::vector<float> prompt_logprobs;
};

struct GenerateRequest {
  std::string prompt = {};  // used when tokens is empty
  std::vector<int32_t> tokens = {};
  SamplingParams sampling = {};
  std::string salt = {};  // requests with different salts never share cached prefixes
};

// One message of a user, and what the model is told to be.
struct ChatPrompt {
  std::string user = {};
  std::optional<std::string> system = {};  // unset: the template's own message, if it has one
};

struct GenerateResult {
  int64_t request = 0;
  std::vector<int32_t> tokens;  // generated
  std::string text;
  FinishReason finish = FinishReason::none;
  std::string error;  // with FinishReason::failed: why; what was generated before it is kept
  // As asked for by SamplingParams, else empty: per generated token, and [prompt_tokens], first 0.
  std::vector<float> logprobs;
  std::vector<std::vector<TokenLogprob>> top;
  std::vector<float> prompt_logprobs;
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;  // of the prompt, served by the prefix cache
};

// Adds an event to the result of its request, for callers of step(). The log-probabilities of the
// event count only with `logprobs`, which says that SamplingParams::logprobs is 0 or more.
void append_event(GenerateResult& result, const TokenEvent& event, bool logprobs);

// Bytes that an engine allocates on its device, part by part.
struct EngineMemory {
  size_t weights = 0;      // on the CPU those of files stay mapped
  size_t caches = 0;       // all pools: keys and values, windows, recurrent states
  size_t activations = 0;  // of a pass of max_batch_tokens tokens
  size_t positions = 0;    // tables of rotary positions
  size_t attention = 0;    // workspace of the attention backends
  size_t logits = 0;       // of the rows of one pass that tokens are drawn from or scored by
  size_t products = 0;     // on a GPU: workspace of matrix products
  size_t batch = 0;        // arrays of a batch, the table of requests
  size_t graphs = 0;       // on a GPU: by how much captured decode steps lowered its free memory

  size_t total() const {
    return weights + caches + activations + positions + attention + logits + products + batch +
           graphs;
  }
  std::string explain() const;  // a line of the parts that are not 0, in MB
};

struct EngineStats {
  int64_t steps = 0;
  int64_t prefill_tokens = 0, decode_tokens = 0;
  double prefill_seconds = 0, decode_seconds = 0;
  EngineMemory memory;
  int32_t graphs = 0;                           // captured decode steps
  int64_t shared_steps = 0;                     // in which shared prefixes were read once
  int64_t prefix_queries = 0, prefix_hits = 0;  // tokens
  int64_t preemptions = 0;
  int64_t kv_pages = 0, kv_pages_free = 0;  // of the full pools, without the reserved page
};

// What serves one layer group.
struct GroupSelection {
  std::string layers;  // "layers 0, 2, 4"
  BackendRequest request;
  Selection prefill;
  std::optional<Selection> decode;  // with EngineOptions::decode_backend; unset: as prefill
  // On a GPU with EngineOptions::cuda_graphs: why decode steps of the model are enqueued, not
  // replayed. Empty: these layers can be captured.
  std::string why_no_graphs;

  // The sum over the backends that serve the group.
  size_t workspace_bytes() const;
};

// What Engine::load would choose and allocate.
struct EnginePlan {
  std::vector<GroupSelection> selections;               // one per layer group
  EngineMemory memory;                                  // graphs is 0: only a capture tells
  int32_t max_context = 0, wanted_context = 0;          // as those of Engine
  std::shared_ptr<const BackendRegistry> own_registry;  // without EngineOptions::registry
  std::string explain() const;                          // selections and memory as text
};

// Not thread-safe: one thread calls it.
class Engine {
 public:
  // Error{corrupt_file}, {io}, {unsupported} or {out_of_memory} say what was wrong with which file,
  // backend or budget.
  // On the CPU weights stay in the mapped files. step() throws Error{io} with the name of a file
  // that has been shortened since; the first load of a process installs a handler for SIGBUS for
  // that, which passes every signal that is not about these files on to the handler before it.
  static std::unique_ptr<Engine> load(const EngineOptions& options);
  // What load() would do, without reading or making a weight. `device`: a device that need not be
  // here, instead of options.device; kv_memory_bytes must then be given. Errors as of load().
  // The selections are valid as long as options.registry or, without one, the plan.
  static EnginePlan plan(const EngineOptions& options,
                         const std::optional<DeviceInfo>& device = {});
  virtual ~Engine() = default;

  // Queues a request and returns its id; ids count up from 1. Error{invalid_argument} names the
  // field, its value and the limit, e.g. a prompt longer than the context.
  virtual int64_t add(const GenerateRequest& request) = 0;
  // Its last event has the text that was held back. Unknown or finished ids are ignored.
  virtual void cancel(int64_t request) = 0;
  virtual bool idle() const = 0;

  // One forward pass: admits, prefills and decodes what fits. Events of every token it produced.
  // A request fails alone, with an event of FinishReason::failed, when its logits are not numbers,
  // when memory ends at its token, or when the pools cannot hold it: the events of all others are
  // returned beside it. Throws when the whole pass fails: every running request is then preempted,
  // and the next call computes it anew.
  virtual std::vector<TokenEvent> step() = 0;

  // Forgets every cached prefix that no running request uses.
  virtual void clear_prefix_cache() = 0;

  // add() for all, step() until all have finished. Results in the order of the requests; a request
  // that failed is a result like the others. Throws what add() and step() throw, after it cancelled
  // all of `requests`: only `on_token` has then seen what they generated. `on_token`
  // sees every event of theirs and may call add() and cancel(), not step() or generate(). `stop` is
  // asked before every step: true cancels what has not finished, and results hold what there is.
  virtual std::vector<GenerateResult> generate(
      std::span<const GenerateRequest> requests,
      const std::function<void(const TokenEvent&)>& on_token = {},
      const std::function<bool()>& stop = {}) = 0;

  // Logits of every token of one sequence, [tokens, vocabulary] f32; runs alone, reuses no cache.
  virtual std::vector<float> logits(std::span<const int32_t> tokens) = 0;

  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // The prompt in the chat format of the checkpoint, up to where the answer begins. The format is
  // recognised from the checkpoint's chat template: ChatML, Llama 3, Mistral ([INST]) or Gemma.
  // Special tokens in the prompt's own text are recognised too. Error{unsupported} for a checkpoint
  // without a template or with another format, Error{invalid_argument} for a system message where
  // the format has none.
  virtual std::vector<int32_t> encode_chat(const ChatPrompt& prompt) const = 0;
  // Ids without text, special ones and those outside the vocabulary, give none.
  virtual std::string decode(std::span<const int32_t> tokens) const = 0;
  virtual int32_t vocabulary() const = 0;
  virtual int32_t max_context() const = 0;
  // The options' or the model's; more than max_context() where the KV budget holds less.
  virtual int32_t wanted_context() const = 0;
  virtual const EngineStats& stats() const = 0;
  // Choices of the load that a caller may not expect, one sentence each: which of two checkpoints
  // in a folder is read, why the default context is shorter than the model's, why there is no text.
  virtual std::span<const std::string> notes() const = 0;
  // Whether the checkpoint's tokenizer was read. Without one requests give token ids, results and
  // decode() have no text, and encode(), prompts and stop strings are Errors that say why.
  virtual bool has_text() const = 0;
  // One per layer group, valid as long as the engine.
  virtual std::span<const GroupSelection> selections() const = 0;
  virtual std::string explain() const = 0;  // the same as text
};

}  // namespace fovea
