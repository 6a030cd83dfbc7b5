# SPDX-License-Identifier: Apache-2.0
"""Answers of `fovea serve`: contents and forms. Usage: server_test.py SOURCES FOVEA"""
import json
import math
import subprocess
import threading
import time

from served import Served, run_tests

PROMPT = "And it came to pass in the days of"


class Answers(Served):
    def generate(self, *flags):
        """Returns what the command line tool generates."""
        done = subprocess.run([self.program, "generate", self.server.model, "--json", "--threads", "1", *flags],
                              capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    def complete(self, **fields):
        return self.server.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 12} | fields)

    def test_models(self):
        status, headers, body = self.server.request("GET", "/v1/models")
        self.assertEqual(status, 200)
        self.assertEqual(headers["content-type"], "application/json")
        listed = json.loads(body)
        self.assertEqual(listed["object"], "list")
        model = listed["data"][0]
        self.assertEqual((model["id"], model["object"], model["max_model_len"]), ("tiny", "model", 8192))
        self.assertEqual(json.loads(self.server.request("GET", "/v1/models/tiny")[2]), model)
        self.assertEqual(self.server.request("GET", "/v1/models/other")[0], 404)

    def test_small_endpoints(self):
        self.assertEqual(self.server.request("GET", "/health")[0], 200)
        status, headers, page = self.server.request("GET", "/")
        self.assertEqual(status, 200)
        self.assertIn(b"<!doctype html>", page)
        self.assertIn("default-src 'none'", headers["content-security-policy"])
        info = json.loads(self.server.request("GET", "/server_info")[2])
        self.assertEqual((info["model"], info["max_model_len"]), ("tiny", 8192))
        self.assertEqual(len(info["internal_states"]), 1)

    def test_greedy_text_is_that_of_the_command_line(self):
        wanted = self.generate("-p", PROMPT, "-n", "12")
        answer = self.complete(return_token_ids=True)
        choice = answer["choices"][0]
        self.assertEqual(choice["text"], wanted["text"])
        self.assertEqual(choice["token_ids"], wanted["tokens"])
        self.assertEqual(choice["finish_reason"], wanted["finish_reason"])
        usage = answer["usage"]
        self.assertEqual(usage["completion_tokens"], len(wanted["tokens"]))
        self.assertEqual(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"])
        self.assertEqual((answer["object"], answer["model"]), ("text_completion", "tiny"))

    def test_logprobs_of_the_prompt(self):
        wanted = self.generate("-p", PROMPT, "-n", "1", "--logprobs", "2", "--prompt-logprobs")
        choice = self.complete(max_tokens=1, echo=True, logprobs=2)["choices"][0]
        scores = choice["logprobs"]
        self.assertEqual(choice["text"], PROMPT + wanted["text"])
        self.assertIsNone(scores["token_logprobs"][0])
        self.assertIsNone(scores["top_logprobs"][0])
        for got, expected in zip(scores["token_logprobs"][1:], wanted["prompt_logprobs"][1:] + wanted["logprobs"],
                                 strict=True):
            self.assertAlmostEqual(got, expected, delta=1e-5)
        for score, top in zip(scores["token_logprobs"][1:], scores["top_logprobs"][1:]):
            self.assertIn(len(top), (2, 3))
            self.assertIn(score, top.values())
        self.assertEqual("".join(scores["tokens"]).removeprefix("<|bos|>"), PROMPT + wanted["text"])
        self.assertEqual(scores["text_offset"][1] - scores["text_offset"][0], len(scores["tokens"][0]))

    def test_echo_without_output(self):
        answer = self.complete(max_tokens=0, echo=True, logprobs=0)
        self.assertEqual(answer["choices"][0]["text"], PROMPT)
        self.assertEqual(answer["usage"]["completion_tokens"], 0)
        self.assertEqual(len(answer["choices"][0]["logprobs"]["tokens"]), answer["usage"]["prompt_tokens"])

    def test_prompt_logprobs_of_vllm(self):
        answer = self.complete(max_tokens=1, prompt_logprobs=2, return_token_ids=True)
        choice = answer["choices"][0]
        self.assertIsNone(choice["logprobs"])
        scores = choice["prompt_logprobs"]
        self.assertIsNone(scores[0])
        for token, entries in zip(choice["prompt_token_ids"][1:], scores[1:], strict=True):
            self.assertIn(str(token), entries)
            self.assertEqual(sorted(e["rank"] for e in entries.values() if e["rank"]), [1, 2])

    def test_prompts_and_choices_are_numbered(self):
        both = self.server.post("/v1/completions", {"prompt": [PROMPT, "In the beginning"], "n": 2, "seed": 5,
                                                    "max_tokens": 6, "temperature": 1})
        self.assertEqual([c["index"] for c in both["choices"]], [0, 1, 2, 3])
        alone = self.server.post("/v1/completions", {"prompt": "In the beginning", "n": 2, "seed": 5, "max_tokens": 6,
                                                     "temperature": 1})
        self.assertEqual([c["text"] for c in both["choices"][2:]], [c["text"] for c in alone["choices"]])
        self.assertNotEqual(alone["choices"][0]["text"], alone["choices"][1]["text"])

    def test_best_of_returns_the_likeliest(self):
        fields = {"temperature": 1, "seed": 3, "max_tokens": 5, "ignore_eos": True}
        every = self.complete(n=6, logprobs=0, **fields)["choices"]
        best = max(every, key=lambda c: sum(c["logprobs"]["token_logprobs"]))
        self.assertEqual(self.complete(n=1, best_of=6, **fields)["choices"][0]["text"], best["text"])

    def test_biases_penalties_and_stops(self):
        token = self.server.post("/tokenize", {"prompt": " lord", "add_special_tokens": False})["tokens"][0]
        answer = self.complete(logit_bias={str(token): 100}, max_tokens=3, return_token_ids=True)
        self.assertEqual(answer["choices"][0]["token_ids"], [token] * 3)
        answer = self.complete(logit_bias={str(token): 100}, stop_token_ids=[token], return_token_ids=True)
        self.assertEqual(answer["choices"][0]["stop_reason"], token)
        self.assertEqual(answer["choices"][0]["text"], "")
        text = self.complete()["choices"][0]["text"]
        stop = text[5:8]
        stopped = self.complete(stop=stop)["choices"][0]
        self.assertEqual(stopped["text"], text[:text.index(stop)])
        self.assertEqual(stopped["finish_reason"], "stop")

    def test_cached_tokens(self):
        long = " ".join([PROMPT] * 8) + " cached"
        for cached in (False, True):
            usage = self.complete(prompt=long, cache_salt="x")["usage"]
            self.assertEqual(usage["prompt_tokens_details"]["cached_tokens"] > 0, cached)
        usage = self.complete(prompt=long, cache_salt="y")["usage"]
        self.assertEqual(usage["prompt_tokens_details"]["cached_tokens"], 0)
        self.assertEqual(self.server.request("POST", "/flush_cache")[0], 200)
        usage = self.complete(prompt=long, cache_salt="x")["usage"]
        self.assertEqual(usage["prompt_tokens_details"]["cached_tokens"], 0)

    def test_streamed_completion(self):
        whole = self.complete(logprobs=1)
        *events, end = self.server.stream("/v1/completions", {
            "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 1,
            "stream_options": {"include_usage": True}})
        self.assertEqual(end, "[DONE]")
        *chunks, last = [json.loads(event) for event in events]
        self.assertEqual(last["choices"], [])
        self.assertEqual(last["usage"]["completion_tokens"], whole["usage"]["completion_tokens"])
        self.assertEqual("".join(c["choices"][0]["text"] for c in chunks), whole["choices"][0]["text"])
        self.assertEqual(len({c["id"] for c in chunks}), 1)
        self.assertEqual([c["choices"][0]["finish_reason"] for c in chunks][:-1], [None] * (len(chunks) - 1))
        self.assertEqual(chunks[-1]["choices"][0]["finish_reason"], "length")
        offsets = [c["choices"][0]["logprobs"]["text_offset"][0] for c in chunks]
        self.assertEqual(offsets, whole["choices"][0]["logprobs"]["text_offset"])

    def test_streamed_echo_and_running_usage(self):
        *events, _ = self.server.stream("/v1/completions", {
            "prompt": PROMPT, "max_tokens": 3, "echo": True, "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
        chunks = [json.loads(event) for event in events]
        self.assertEqual(chunks[0]["choices"][0]["text"], PROMPT)
        self.assertEqual([c["usage"]["completion_tokens"] for c in chunks[1:]], [1, 2, 3, 3])

    def chat(self, **fields):
        return {"messages": [{"role": "system", "content": "Be brief."},
                             {"role": "user", "content": [{"type": "text", "text": "Who was Noah?"}]}],
                "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields

    def test_chat(self):
        answer = self.server.post("/v1/chat/completions", self.chat(logprobs=True, top_logprobs=2))
        self.assertEqual(answer["object"], "chat.completion")
        choice = answer["choices"][0]
        self.assertEqual(choice["message"]["role"], "assistant")
        content = choice["logprobs"]["content"]
        self.assertEqual(len(content), 8)
        self.assertEqual(b"".join(bytes(entry["bytes"]) for entry in content).decode("utf-8", "replace").strip(),
                         choice["message"]["content"].strip())
        for entry in content:
            self.assertEqual(len(entry["top_logprobs"]), 2)
            self.assertAlmostEqual(entry["top_logprobs"][0]["logprob"], entry["logprob"])
        prompt = self.generate("--chat", "-p", "Who was Noah?", "--system", "Be brief.", "-n", "8", "--ignore-eos")
        self.assertEqual(choice["message"]["content"], prompt["text"])
        tokens = self.server.post("/tokenize", {"messages": self.chat()["messages"]})
        self.assertEqual(tokens["count"], answer["usage"]["prompt_tokens"])

    def test_conversations(self):
        """Earlier turns are a part of the prompt, and cached."""
        messages = [{"role": "user", "content": "Who was Noah?"}, {"role": "assistant", "content": "A man."},
                    {"role": "user", "content": "And his sons?"}]
        counts = [self.server.post("/tokenize", {"messages": messages[:n]})["count"] for n in (1, 3)]
        self.assertGreater(counts[1], counts[0] + 10)
        answer = self.server.post("/v1/chat/completions", self.chat(messages=messages))
        self.assertEqual(answer["usage"]["prompt_tokens"], counts[1])

    def test_json_answers(self):
        schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"],
                  "additionalProperties": False}
        answer = self.server.post("/v1/chat/completions", self.chat(max_tokens=60, response_format={
            "type": "json_schema", "json_schema": {"name": "n", "schema": schema}}))
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            self.assertIsInstance(json.loads(choice["message"]["content"])["age"], int)
        else:
            self.assertRegex(choice["message"]["content"], r'^\s*{\s*"age"\s*:\s*-?[0-9]*')

    def test_streamed_chat(self):
        whole = self.server.post("/v1/chat/completions", self.chat())
        *events, end = self.server.stream("/v1/chat/completions", self.chat(n=2))
        self.assertEqual(end, "[DONE]")
        chunks = [json.loads(event)["choices"][0] for event in events]
        for index in (0, 1):
            first, *rest = [c for c in chunks if c["index"] == index]
            self.assertEqual(first["delta"], {"role": "assistant", "content": ""})
            self.assertEqual("".join(c["delta"]["content"] for c in rest), whole["choices"][0]["message"]["content"])
            self.assertEqual(rest[-1]["finish_reason"], "length")

    def test_tokenize_and_back(self):
        answer = self.server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
        self.assertEqual(answer["count"], len(answer["tokens"]))
        self.assertEqual("".join(answer["token_strs"]).removeprefix("<|bos|>"), PROMPT)
        self.assertEqual(self.server.post("/detokenize", {"tokens": answer["tokens"]})["prompt"], PROMPT)
        info = json.loads(self.server.request("GET", "/tokenizer_info")[2])
        self.assertEqual(info["eos_token"], "<|eos|>")

    def test_request_ids_and_ignored_fields(self):
        _, headers, _ = self.server.request("POST", "/v1/completions", {"prompt": "a", "frob\r\nx": 1, "frob": 2},
                                            {"X-Request-Id": "abc-1"})
        self.assertEqual(headers["x-request-id"], "abc-1")
        self.assertEqual(headers["x-fovea-ignored-fields"], "frob")

    def test_metrics_count(self):
        before = self.server.metric("fovea_generation_tokens_total")
        self.complete(max_tokens=5, ignore_eos=True)
        self.assertEqual(self.server.metric("fovea_generation_tokens_total") - before, 5)
        self.assertGreater(self.server.metric('fovea_requests_total{finish_reason="length"}'), 0)

    def test_many_streams_at_once(self):
        """The healthy endpoint answers while 16 chats stream, and every stream gets its own text."""
        bodies = [self.chat(messages=[{"role": "user", "content": f"Tell me of king number {i}"}], max_tokens=24)
                  for i in range(16)]
        alone = [self.server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"] for body in bodies]
        texts = [None] * len(bodies)

        def read(index):
            *events, _ = self.server.stream("/v1/chat/completions", bodies[index])
            texts[index] = "".join(json.loads(e)["choices"][0]["delta"]["content"] for e in events)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(len(bodies))]
        for thread in threads:
            thread.start()
        times = []
        while any(thread.is_alive() for thread in threads):
            start = time.monotonic()
            self.assertEqual(self.server.request("GET", "/health")[0], 200)
            times.append(time.monotonic() - start)
        for thread in threads:
            thread.join()
        self.assertLess(max(times, default=0), 5)
        # Batches of another size may round otherwise, so a late token may differ.
        for text, other in zip(texts, alone):
            self.assertEqual(text[:8], other[:8])

    def test_numbers_are_finite(self):
        choice = self.complete(logprobs=20, max_tokens=2)["choices"][0]
        for top in choice["logprobs"]["top_logprobs"]:
            self.assertTrue(all(math.isfinite(value) for value in top.values()))


class Overlapped(Served):
    """Passes that are enqueued before the one before has ended."""

    flags = ("--overlap",)

    def test_schemas_do_not_make_passes_wait(self):
        """Answers are those of requests whose tokens the host draws, because they want log-probabilities."""
        schema = {"type": "array", "items": {"enum": ["red", "green", 17]}, "minItems": 30}
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 1, "seed": 3, "structured_outputs": {"json": schema}}
        names = "fovea_engine_steps_total", "fovea_overlapped_steps_total"
        before = [self.server.metric(name) for name in names]
        text = self.server.post("/v1/completions", body)["choices"][0]["text"]
        self.assertRegex(text, r'^\s*\[\s*("red"|"green"|17)')
        steps, overlapped = (self.server.metric(name) - old for name, old in zip(names, before))
        self.assertEqual((steps, overlapped), (24, 23))
        self.assertEqual(self.server.post("/v1/completions", body | {"logprobs": 0})["choices"][0]["text"], text)


if __name__ == "__main__":
    run_tests()
