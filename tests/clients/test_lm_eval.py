# SPDX-License-Identifier: Apache-2.0
"""lm-eval's local-completions against the server: scores equal the engine's own."""
import json
import os
import subprocess

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

TEXTS = [("And it came to pass", " in the days of"), ("In the beginning God created", " the heaven and the earth"),
         ("The LORD is my", " shepherd; I shall not want")]


@pytest.fixture
def model(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-for-tests")
    return LocalCompletionsAPI(base_url=f"http://127.0.0.1:{server.port}/v1/completions", model="tiny",
                               tokenizer_backend="remote", auth_token="a-key-for-tests", batch_size=1)


def tokens_of(server, text, special=False):
    return server.post("/tokenize", {"prompt": text, "add_special_tokens": special},
                       {"Authorization": "Bearer a-key-for-tests"})["tokens"]


def own_score(server, tokens, context):
    """Returns the log-probability of the tokens after the context, and whether greedy decoding gives them."""
    program = os.environ.get("FOVEA_CLI", "build/fovea")
    done = subprocess.run([program, "generate", server.model, "--json", "--threads", "1", "-n", "1",
                           "--prompt-logprobs", "--tokens", ",".join(map(str, tokens))],
                          capture_output=True, text=True, check=True)
    return sum(json.loads(done.stdout)["prompt_logprobs"][context:])


def test_log_likelihoods(model, server):
    requests, wanted = [], []
    for context, continuation in TEXTS:
        prompt, end = tokens_of(server, context), tokens_of(server, continuation)
        requests.append(((context, continuation), prompt, end))
        wanted.append(own_score(server, prompt + end, len(prompt)))
    scores = model._loglikelihood_tokens(requests, disable_tqdm=True)
    for (score, greedy), own in zip(scores, wanted, strict=True):
        assert score == own  # to the last bit, in fp32
        assert isinstance(greedy, bool)


def test_generation(model, server):
    instance = Instance(request_type="generate_until", doc={}, idx=0, metadata=("t", 0, 1),
                        arguments=("And it came to pass", {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}))
    (text,) = model.generate_until([instance], disable_tqdm=True)
    answer = server.post("/v1/completions", {"prompt": "And it came to pass", "max_tokens": 8, "temperature": 0,
                                             "stop": ["\n"]}, {"Authorization": "Bearer a-key-for-tests"})
    assert text == answer["choices"][0]["text"]
