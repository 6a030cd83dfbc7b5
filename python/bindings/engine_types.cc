// SPDX-License-Identifier: Apache-2.0
// Sampling parameters, events, results and counters of the engine.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "fovea/engine.h"
#include "python/bindings/engines.h"
#include "python/bindings/value_type.h"

namespace fovea {

static bool operator==(const TokenBias& a, const TokenBias& b) {
  return a.token == b.token && a.bias == b.bias;
}

static bool operator==(const SamplingParams& a, const SamplingParams& b) {
  return a.max_new_tokens == b.max_new_tokens && a.temperature == b.temperature &&
         a.top_k == b.top_k && a.top_p == b.top_p && a.min_p == b.min_p && a.seed == b.seed &&
         a.stop == b.stop && a.stop_tokens == b.stop_tokens && a.ignore_eos == b.ignore_eos &&
         a.logprobs == b.logprobs && a.prompt_logprobs == b.prompt_logprobs &&
         a.logit_bias == b.logit_bias && a.repetition_penalty == b.repetition_penalty &&
         a.frequency_penalty == b.frequency_penalty && a.presence_penalty == b.presence_penalty &&
         a.min_tokens == b.min_tokens && a.json_schema == b.json_schema;
}

}  // namespace fovea

namespace fovea::python {

namespace {

// In Python a dict of token ids.
constexpr Field<SamplingParams> kLogitBias = {
    "logit_bias",
    [](SamplingParams& params, nb::handle object, const char* name) {
      check_argument(PyDict_Check(object.ptr()) != 0, "{} is {}, must be a dict", name,
                     type_text(object));
      params.logit_bias.clear();
      for (const auto& [key, value] : nb::borrow<nb::dict>(object)) {
        const auto token = integer_from<int32_t>(key, fmt::format("a key of {}", name));
        const double bias = number_from(value, fmt::format("{}[{}]", name, token));
        params.logit_bias.push_back({token, static_cast<float>(bias)});
      }
    },
    [](const SamplingParams& params) -> nb::object {
      nb::dict biases;
      for (const TokenBias& bias : params.logit_bias)
        biases[nb::int_(bias.token)] = float_object(bias.bias);
      return biases;
    },
    [](const SamplingParams& params) {
      size_t seed = 0;
      for (const TokenBias& bias : params.logit_bias)
        seed = mix(mix(seed, hash_of(bias.token)), hash_of(bias.bias));
      return seed;
    }};

}  // namespace

template <>
std::span<const Field<SamplingParams>> fields_of<SamplingParams>() {
  using Params = SamplingParams;
  static constexpr Field<Params> table[] = {
      field<&Params::max_new_tokens>("max_new_tokens"),
      field<&Params::temperature>("temperature"),
      field<&Params::top_k>("top_k"),
      field<&Params::top_p>("top_p"),
      field<&Params::min_p>("min_p"),
      field<&Params::seed>("seed"),
      field<&Params::stop>("stop"),
      field<&Params::stop_tokens>("stop_tokens"),
      field<&Params::ignore_eos>("ignore_eos"),
      field<&Params::logprobs>("logprobs"),
      field<&Params::prompt_logprobs>("prompt_logprobs"),
      kLogitBias,
      field<&Params::repetition_penalty>("repetition_penalty"),
      field<&Params::frequency_penalty>("frequency_penalty"),
      field<&Params::presence_penalty>("presence_penalty"),
      field<&Params::min_tokens>("min_tokens"),
      field<&Params::json_schema>("json_schema")};
  return table;
}

namespace {

void bind_events(nb::module_& module) {
  nb::class_<TokenLogprob>(module, "TokenLogprob", "A token and its natural log-probability.",
                           nb::is_final())
      .def_ro("token", &TokenLogprob::token)
      .def_ro("logprob", &TokenLogprob::logprob)
      .def("__repr__", [](const TokenLogprob& self) {
        return fmt::format("TokenLogprob(token={}, logprob={})", self.token, self.logprob);
      });
  nb::class_<TokenEvent>(module, "TokenEvent",
                         "A token of a request, or its end. token is -1 in an event that brings "
                         "none; finish is FinishReason.none until the last event.",
                         nb::is_final())
      .def_ro("request", &TokenEvent::request)
      .def_ro("token", &TokenEvent::token)
      .def_ro("text", &TokenEvent::text, "Text that this token made final.")
      .def_ro("logprob", &TokenEvent::logprob)
      .def_ro("top", &TokenEvent::top)
      .def_prop_ro("finish", [](const TokenEvent& self) { return self.finish; })
      .def_ro("error", &TokenEvent::error)
      .def_ro("prompt_tokens", &TokenEvent::prompt_tokens)
      .def_ro("cached_tokens", &TokenEvent::cached_tokens)
      .def_ro("prompt_logprobs", &TokenEvent::prompt_logprobs)
      .def("__repr__", [](const TokenEvent& self) {
        return fmt::format("TokenEvent(request={}, token={}, finish='{}')", self.request,
                           self.token,
                           enumerators<FinishReason>()[static_cast<size_t>(self.finish)].text);
      });
  nb::class_<GenerateResult>(module, "GenerateResult", "The output of one request.", nb::is_final())
      .def_ro("request", &GenerateResult::request)
      .def_ro("tokens", &GenerateResult::tokens, "The generated tokens.")
      .def_ro("text", &GenerateResult::text)
      .def_prop_ro("finish", [](const GenerateResult& self) { return self.finish; })
      .def_ro("error", &GenerateResult::error, "With FinishReason.failed: the reason.")
      .def_ro("logprobs", &GenerateResult::logprobs)
      .def_ro("top", &GenerateResult::top)
      .def_ro("prompt_logprobs", &GenerateResult::prompt_logprobs)
      .def_ro("prompt_tokens", &GenerateResult::prompt_tokens)
      .def_ro("cached_tokens", &GenerateResult::cached_tokens,
              "Prompt tokens that the prefix cache served.")
      .def("__repr__", [](const GenerateResult& self) {
        return fmt::format("GenerateResult(request={}, {} tokens, finish='{}')", self.request,
                           self.tokens.size(),
                           enumerators<FinishReason>()[static_cast<size_t>(self.finish)].text);
      });
}

void bind_counters(nb::module_& module) {
  nb::class_<EngineMemory>(module, "EngineMemory",
                           "Bytes that an engine allocates on its device, by purpose.",
                           nb::is_final())
      .def_ro("weights", &EngineMemory::weights)
      .def_ro("caches", &EngineMemory::caches)
      .def_ro("activations", &EngineMemory::activations)
      .def_ro("positions", &EngineMemory::positions)
      .def_ro("attention", &EngineMemory::attention)
      .def_ro("logits", &EngineMemory::logits)
      .def_ro("products", &EngineMemory::products)
      .def_ro("batch", &EngineMemory::batch)
      .def_ro("graphs", &EngineMemory::graphs)
      .def_ro("drafter", &EngineMemory::drafter)
      .def_prop_ro("total", &EngineMemory::total)
      .def("explain", &EngineMemory::explain, "Returns one line with all parts that are not 0.");
  nb::class_<EngineStats>(module, "EngineStats", "Counters of an engine, copied when read.",
                          nb::is_final())
      .def_ro("steps", &EngineStats::steps)
      .def_ro("prefill_tokens", &EngineStats::prefill_tokens)
      .def_ro("decode_tokens", &EngineStats::decode_tokens)
      .def_ro("prefill_seconds", &EngineStats::prefill_seconds)
      .def_ro("decode_seconds", &EngineStats::decode_seconds)
      .def_ro("memory", &EngineStats::memory)
      .def_prop_ro("graphs", [](const EngineStats& self) { return self.graphs.count(); })
      .def_ro("shared_steps", &EngineStats::shared_steps)
      .def_ro("prefix_queries", &EngineStats::prefix_queries)
      .def_ro("prefix_hits", &EngineStats::prefix_hits)
      .def_ro("preemptions", &EngineStats::preemptions)
      .def_ro("draft_steps", &EngineStats::draft_steps)
      .def_ro("draft_requests", &EngineStats::draft_requests)
      .def_ro("drafts", &EngineStats::drafts)
      .def_ro("accepted_drafts", &EngineStats::accepted_drafts)
      .def_ro("speculation_gain", &EngineStats::speculation_gain)
      .def_ro("kv_pages", &EngineStats::kv_pages)
      .def_ro("kv_pages_free", &EngineStats::kv_pages_free);
}

}  // namespace

void bind_engine_types(nb::module_& module) {
  bind_value_type<SamplingParams>(
      module, "SamplingParams",
      "def __init__(self, *, max_new_tokens: int = 64, temperature: float = 0, top_k: int = 0, "
      "top_p: float = 1, min_p: float = 0, seed: int = 0, stop: collections.abc.Sequence[str] = "
      "(), stop_tokens: collections.abc.Sequence[int] = (), ignore_eos: bool = False, logprobs: "
      "int = -1, prompt_logprobs: bool = False, logit_bias: collections.abc.Mapping[int, float] = "
      "{}, repetition_penalty: float = 1, frequency_penalty: float = 0, presence_penalty: float = "
      "0, min_tokens: int = 0, json_schema: str = '') -> None",
      "How tokens are chosen and when a request ends. temperature 0 is greedy; logprobs -1: off; "
      "with json_schema, a text, the answer is JSON that this schema allows.");
  bind_events(module);
  bind_counters(module);
}

}  // namespace fovea::python
