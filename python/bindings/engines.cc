// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/engines.h"

#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "python/bindings/array.h"
#include "python/bindings/devices.h"
#include "python/bindings/layer_array.h"
#include "python/bindings/module.h"
#include "python/bindings/value_type.h"

namespace fovea::python {

namespace {

// A request's events as an iterator. It ends the request when nobody can read further events.
class TokenStream {
 public:
  TokenStream(nb::object engine, int64_t request, std::shared_ptr<StreamEvents> events)
      : engine_(std::move(engine)), request_(request), events_(std::move(events)) {}
  TokenStream(TokenStream&&) = default;
  ~TokenStream() {
    if (events_ != nullptr) close();
  }

  int64_t request() const { return request_; }
  TokenEvent next() {
    std::optional<TokenEvent> event = engine().next(*events_);
    if (!event) throw nb::stop_iteration();
    return std::move(*event);
  }
  void close() { engine().close(request_, *events_); }

 private:
  SharedEngine& engine() { return nb::cast<SharedEngine&>(engine_); }

  nb::object engine_;
  int64_t request_;
  std::shared_ptr<StreamEvents> events_;
};

// Takes an argument out of the keywords; None if it was not given.
nb::object take(nb::kwargs& arguments, const char* name) {
  if (!arguments.contains(name)) return nb::none();
  nb::object value = arguments[name];
  nb::del(arguments[name]);
  return value;
}

// Completes a request with `salt`, the SamplingParams `sampling`, and fields given by keyword.
void complete_request(GenerateRequest& request, nb::handle sampling, nb::kwargs arguments) {
  const nb::object salt = take(arguments, "salt");
  if (!salt.is_none()) request.salt = string_from(salt, "salt");
  if (!sampling.is_none()) request.sampling = value_from<SamplingParams>(sampling, "sampling");
  set_fields(request.sampling, arguments, "SamplingParams");
}

nb::kwargs copy_of(const nb::kwargs& arguments) {
  return nb::steal<nb::kwargs>(PyDict_Copy(arguments.ptr()));
}

GenerateRequest make_request(nb::handle prompt, nb::handle sampling, const nb::kwargs& arguments) {
  GenerateRequest request = request_from(prompt, "prompt");
  complete_request(request, sampling, copy_of(arguments));
  return request;
}

bool is_list(nb::handle object) {
  return PyList_Check(object.ptr()) != 0 || PyTuple_Check(object.ptr()) != 0;
}

// True for a list of prompts; a list of token ids is one prompt.
bool is_many(nb::handle prompts) {
  if (!is_list(prompts)) return false;
  if (PySequence_Size(prompts.ptr()) == 0) return true;
  const nb::object first = nb::steal(PySequence_GetItem(prompts.ptr(), 0));
  const bool integer = PyLong_Check(first.ptr()) != 0 ||
                       (PyIndex_Check(first.ptr()) != 0 && PySequence_Check(first.ptr()) == 0);
  return !integer;
}

std::vector<GenerateRequest> requests_from(nb::handle prompts, nb::handle sampling,
                                           const nb::kwargs& arguments) {
  std::vector<GenerateRequest> requests;
  if (!is_many(prompts)) {
    requests.push_back(request_from(prompts, "prompts"));
  } else {
    for (Py_ssize_t i = 0, size = PySequence_Size(prompts.ptr()); i < size; ++i) {
      const nb::object prompt = nb::steal(PySequence_GetItem(prompts.ptr(), i));
      requests.push_back(request_from(prompt, fmt::format("prompts[{}]", i).c_str()));
    }
  }
  const bool each = is_list(sampling);
  const Py_ssize_t given = each ? PySequence_Size(sampling.ptr()) : 0;
  check_argument(!each || given == static_cast<Py_ssize_t>(requests.size()),
                 "sampling has {} entries, prompts {}", given, requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    const nb::object own =
        each ? nb::steal(PySequence_GetItem(sampling.ptr(), static_cast<Py_ssize_t>(i)))
             : nb::borrow(sampling);
    complete_request(requests[i], own, copy_of(arguments));
  }
  return requests;
}

nb::object callable(nb::kwargs& arguments, const char* name) {
  nb::object function = take(arguments, name);
  check_argument(function.is_none() || PyCallable_Check(function.ptr()) != 0,
                 "{} is {}, must be callable", name, type_text(function));
  return function;
}

std::vector<GenerateResult> generate(SharedEngine& self, nb::handle prompts, nb::handle sampling,
                                     const nb::kwargs& keywords) {
  nb::kwargs arguments = copy_of(keywords);
  const nb::object on_token = callable(arguments, "on_token");
  const nb::object should_stop = callable(arguments, "should_stop");
  const std::vector<GenerateRequest> requests = requests_from(prompts, sampling, arguments);
  // The callbacks borrow Python objects, which this frame holds.
  const nb::handle event_function = on_token, stop_function = should_stop;
  std::function<void(const TokenEvent&)> call_event;
  if (!on_token.is_none()) {
    call_event = [event_function](const TokenEvent& event) {
      const nb::gil_scoped_acquire acquire;
      event_function(nb::cast(event, nb::rv_policy::copy));
    };
  }
  const auto call_stop = [stop_function] {
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    return !stop_function.is_none() && nb::cast<bool>(nb::bool_(stop_function()));
  };
  return self.locked(
      [&](Engine& engine) { return engine.generate(requests, call_event, call_stop); });
}

GenerateResult chat(SharedEngine& self, nb::handle user, nb::handle sampling,
                    const nb::kwargs& keywords) {
  nb::kwargs arguments = copy_of(keywords);
  ChatPrompt prompt{.user = string_from(user, "user"), .system = {}};
  const nb::object system = take(arguments, "system");
  if (!system.is_none()) prompt.system = string_from(system, "system");
  GenerateRequest request;
  complete_request(request, sampling, std::move(arguments));
  return self.locked([&](Engine& engine) {
    request.tokens = engine.encode_chat(prompt);
    return std::move(engine.generate({&request, 1}, {}, {}).front());
  });
}

// Returns a text as it is, and other objects as JSON; None is empty.
std::string json_from(nb::handle object, const char* name) {
  if (object.is_none()) return {};
  if (PyUnicode_Check(object.ptr()) != 0) return string_from(object, name);
  return string_from(nb::module_::import_("json").attr("dumps")(object), name);
}

std::vector<int32_t> encode_conversation(SharedEngine& self, nb::handle messages, nb::handle tools,
                                         nb::kwargs options) {
  options = copy_of(options);
  Conversation conversation{.messages = json_from(messages, "messages"),
                            .tools = json_from(tools, "tools")};
  conversation.variables = json_from(take(options, "variables"), "variables");
  const nb::object continues = take(options, "continue_last_message");
  if (!continues.is_none())
    conversation.continue_last_message = bool_from(continues, "continue_last_message");
  const nb::object prompts = take(options, "add_generation_prompt");
  conversation.add_generation_prompt = prompts.is_none()
                                           ? !conversation.continue_last_message
                                           : bool_from(prompts, "add_generation_prompt");
  check_argument(options.size() == 0, "encode_conversation has no argument {}",
                 value_text(nb::list(options.keys())));
  return self.locked([&](Engine& engine) { return engine.encode_conversation(conversation); });
}

LayerArray logits(SharedEngine& self, nb::handle tokens) {
  const std::vector<int32_t> ids = integers_of<int32_t>(tokens, "tokens");
  auto values = std::make_unique<std::vector<float>>(
      self.locked([&](Engine& engine) { return engine.logits(ids); }));
  const float* data = values->data();
  const auto rows = static_cast<int64_t>(ids.size());
  const int64_t columns = rows == 0 ? 0 : static_cast<int64_t>(values->size()) / rows;
  const nb::capsule owner(values.release(), [](void* pointer) noexcept {
    delete static_cast<std::vector<float>*>(pointer);
  });
  return dense_array(owner, data, DType::f32, {rows, columns});
}

void bind_stream(nb::module_& module) {
  nb::class_<TokenStream>(module, "TokenStream",
                          "The events of one request, in order. close() cancels the request.",
                          nb::is_final())
      .def_prop_ro("request", &TokenStream::request)
      .def("__iter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__next__", &TokenStream::next)
      .def("close", &TokenStream::close)
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", [](TokenStream& self, const nb::args&) { self.close(); });
}

void bind_running(nb::class_<SharedEngine>& type) {
  type.def("generate", &generate, nb::arg("prompts"), nb::arg("sampling") = nb::none(),
           nb::arg("arguments"),
           nb::sig("def generate(self, prompts: str | collections.abc.Sequence, sampling: "
                   "SamplingParams | collections.abc.Sequence[SamplingParams] | None = None, *, "
                   "on_token: collections.abc.Callable[[TokenEvent], None] | None = None, "
                   "should_stop: collections.abc.Callable[[], bool] | None = None, salt: str = '', "
                   "**fields: typing.Any) -> list[GenerateResult]"),
           "Generates for all prompts (texts, or lists of token ids) and returns their results in "
           "order. fields are those of SamplingParams. on_token receives every event and may call "
           "add() and cancel(). should_stop is called before every step; True cancels the "
           "unfinished requests. An exception of either ends all requests and is raised here.")
      .def(
          "stream",
          [](const nb::pointer_and_handle<SharedEngine>& self, nb::handle prompt,
             nb::handle sampling, const nb::kwargs& arguments) {
            auto [id, events] = self.p->open_stream(make_request(prompt, sampling, arguments));
            return TokenStream(nb::borrow(self.h), id, std::move(events));
          },
          nb::arg("prompt"), nb::arg("sampling") = nb::none(), nb::arg("arguments"),
          nb::sig("def stream(self, prompt: str | collections.abc.Sequence[int], sampling: "
                  "SamplingParams | None = None, *, salt: str = '', **fields: typing.Any) -> "
                  "TokenStream"),
          "Returns an iterator over the events of one request. Streams and step() may be used side "
          "by side.")
      .def("chat", &chat, nb::arg("user"), nb::arg("sampling") = nb::none(), nb::arg("arguments"),
           nb::sig("def chat(self, user: str, sampling: SamplingParams | None = None, *, system: "
                   "str | None = None, salt: str = '', **fields: typing.Any) -> GenerateResult"),
           "Answers one message in the chat format of the checkpoint.")
      .def(
          "add",
          [](SharedEngine& self, nb::handle prompt, nb::handle sampling,
             const nb::kwargs& arguments) {
            const GenerateRequest request = make_request(prompt, sampling, arguments);
            return self.locked([&](Engine& engine) { return engine.add(request); });
          },
          nb::arg("prompt"), nb::arg("sampling") = nb::none(), nb::arg("arguments"),
          nb::sig("def add(self, prompt: str | collections.abc.Sequence[int], sampling: "
                  "SamplingParams | None = None, *, salt: str = '', **fields: typing.Any) -> int"),
          "Queues a request and returns its id.")
      .def("step", &SharedEngine::step,
           "Runs one forward pass and returns the events of requests without a stream.")
      .def(
          "cancel",
          [](SharedEngine& self, nb::handle request) {
            const int64_t id = integer_from<int64_t>(request, "request");
            self.locked([&](Engine& engine) { engine.cancel(id); });
          },
          nb::arg("request"), "Ends a request. Unknown and finished ids are ignored.")
      .def(
          "clear_prefix_cache",
          [](SharedEngine& self) {
            self.locked([](Engine& engine) { engine.clear_prefix_cache(); });
          },
          "Drops every cached prefix that no running request uses.");
}

void bind_text(nb::class_<SharedEngine>& type) {
  type.def(
          "encode",
          [](SharedEngine& self, nb::handle text) {
            const std::string input = string_from(text, "text");
            return self.locked([&](Engine& engine) { return engine.encode(input); });
          },
          nb::arg("text"))
      .def(
          "encode_chat",
          [](SharedEngine& self, nb::handle user, nb::handle system) {
            ChatPrompt prompt{.user = string_from(user, "user"), .system = {}};
            if (!system.is_none()) prompt.system = string_from(system, "system");
            return self.locked([&](Engine& engine) { return engine.encode_chat(prompt); });
          },
          nb::arg("user"), nb::arg("system") = nb::none(),
          "Encodes a message in the chat format of the checkpoint, up to the beginning of the "
          "answer.")
      .def("encode_conversation", &encode_conversation, nb::arg("messages"),
           nb::arg("tools") = nb::none(), nb::arg("options"),
           nb::sig("def encode_conversation(self, messages: str | collections.abc.Sequence, tools: "
                   "str | collections.abc.Sequence | None = None, *, variables: str | "
                   "collections.abc.Mapping | None = None, add_generation_prompt: bool | None = "
                   "None, continue_last_message: bool = False) -> list[int]"),
           "Encodes a conversation as the chat template of the checkpoint writes it. messages, "
           "tools and variables are those of OpenAI's chat completions, as objects or as JSON. "
           "The prompt ends with the beginning of an answer, or within the last message.")
      .def(
          "decode",
          [](SharedEngine& self, nb::handle tokens) {
            const std::vector<int32_t> ids = integers_of<int32_t>(tokens, "tokens");
            const std::string text =
                self.locked([&](Engine& engine) { return engine.decode(ids); });
            // Tokens may end inside a character.
            return nb::steal(
                PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
          },
          nb::arg("tokens"),
          nb::sig("def decode(self, tokens: collections.abc.Sequence[int]) -> "
                  "str"))
      .def("logits", &logits, nb::arg("tokens"),
           "Returns the logits of every token of one sequence, f32 [tokens, vocabulary], for "
           "numpy.from_dlpack.");
}

void bind_properties(nb::class_<SharedEngine>& type) {
  type.def(
          "explain",
          [](SharedEngine& self) {
            return self.locked([](Engine& engine) { return engine.explain(); });
          },
          "Describes the backends and the memory that load() chose.")
      .def_prop_ro("idle",
                   [](SharedEngine& self) {
                     return self.locked([](Engine& engine) { return engine.idle(); });
                   })
      .def_prop_ro("stats",
                   [](SharedEngine& self) {
                     return self.locked([](Engine& engine) { return engine.stats(); });
                   })
      .def_prop_ro("notes",
                   [](SharedEngine& self) {
                     return self.locked([](Engine& engine) {
                       const auto notes = engine.notes();
                       return std::vector<std::string>(notes.begin(), notes.end());
                     });
                   })
      .def_prop_ro("has_text",
                   [](SharedEngine& self) {
                     return self.locked([](Engine& engine) { return engine.has_text(); });
                   })
      .def_prop_ro("vocabulary",
                   [](SharedEngine& self) {
                     return self.locked([](Engine& engine) { return engine.vocabulary(); });
                   })
      .def_prop_ro("max_context",
                   [](SharedEngine& self) {
                     return self.locked([](Engine& engine) { return engine.max_context(); });
                   })
      .def_prop_ro("wanted_context", [](SharedEngine& self) {
        return self.locked([](Engine& engine) { return engine.wanted_context(); });
      });
}

}  // namespace

void bind_engine(nb::module_& module) {
  bind_engine_types(module);
  nb::class_<SharedEngine> engine(module, "Engine",
                                  "Generates text from a checkpoint. Calls from several threads "
                                  "wait for each other; the GIL is released meanwhile.",
                                  nb::is_final(), nb::is_weak_referenceable());
  bind_loading(module, engine);
  bind_stream(module);
  bind_running(engine);
  bind_text(engine);
  bind_properties(engine);
}

}  // namespace fovea::python
