# SPDX-License-Identifier: Apache-2.0
"""The engine on the checkpoints of testdata, against their reference outputs and the command line tool."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import fovea
import numpy as np
import pytest

MODELS = pathlib.Path(__file__).resolve().parents[2] / "testdata" / "models"
LLAMA = MODELS / "llama"
PROMPT = "And God said unto him,"


def safetensors(path):
    """Reads a safetensors file of int64, int32 and float32 arrays."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    types = {"I64": np.int64, "I32": np.int32, "F32": np.float32}
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], types[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def command(*arguments, status=0):
    """Runs `python -m fovea` and returns stdout, or stderr of a failure."""
    run = subprocess.run([sys.executable, "-m", "fovea", *arguments], capture_output=True, text=True, env=os.environ)
    assert run.returncode == status, run.stderr
    return run.stdout if status == 0 else run.stderr


@pytest.fixture(scope="module")
def engine():
    return fovea.Engine.load(LLAMA, max_requests=8, threads=2)


@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir()))
def test_greedy_tokens_are_those_of_the_reference(name):
    expected = safetensors(MODELS / name / "reference.safetensors")
    made = fovea.Engine.load(MODELS / name, threads=2)
    prompts = [expected[f"prompt_{i}.input_ids"].reshape(-1) for i in range(2)]
    results = made.generate([p.tolist() for p in prompts], max_new_tokens=16, ignore_eos=True)
    for i, result in enumerate(results):
        assert result.tokens == expected[f"prompt_{i}.greedy_64"].reshape(-1)[:16].tolist()
        assert result.prompt_tokens == len(prompts[i])
    logits = np.from_dlpack(made.logits(prompts[0]))
    assert logits.shape == (len(prompts[0]), made.vocabulary) and logits.dtype == np.float32
    np.testing.assert_allclose(logits[-1], expected["prompt_0.last_logits"].reshape(-1), atol=2e-3)


def test_text_is_that_of_the_command_line_tool(engine):
    (result,) = engine.generate(PROMPT, max_new_tokens=12)
    printed = command("generate", str(LLAMA), "--prompt", PROMPT, "--max-new-tokens", "12")
    assert result.text and result.text.strip() in printed
    assert engine.decode(result.tokens) == result.text
    assert engine.encode(PROMPT) and result.finish == "length"


def test_prompts_of_every_form(engine):
    ids = engine.encode(PROMPT)
    (text,) = engine.generate(PROMPT, max_new_tokens=4)
    for prompts in (ids, tuple(ids), np.array(ids, np.int32), np.array(ids), [PROMPT], [ids], [np.array(ids)]):
        assert [r.tokens for r in engine.generate(prompts, max_new_tokens=4)] == [text.tokens]
    first, second = engine.generate([PROMPT, ids], [fovea.SamplingParams(max_new_tokens=n) for n in (2, 3)])
    assert (len(first.tokens), len(second.tokens)) == (2, 3)
    assert engine.generate([]) == []


def test_sampling(engine):
    sampling = fovea.SamplingParams(temperature=1, seed=7, max_new_tokens=8, ignore_eos=True)
    first, again, other = (
        engine.generate(PROMPT, sampling)[0].tokens,
        engine.generate(PROMPT, sampling)[0].tokens,
        engine.generate(PROMPT, sampling, seed=8)[0].tokens,
    )
    assert first == again != other
    (result,) = engine.generate(PROMPT, max_new_tokens=3, logprobs=2, prompt_logprobs=True)
    assert len(result.logprobs) == 3 and [len(top) for top in result.top] == [2, 2, 2]
    assert result.top[0][0].token == result.tokens[0] and result.top[0][0].logprob == result.logprobs[0] < 0
    assert len(result.prompt_logprobs) == result.prompt_tokens and result.prompt_logprobs[0] == 0
    text = engine.generate(PROMPT, max_new_tokens=12)[0].text
    word = text.split()[2]
    (stopped,) = engine.generate(PROMPT, max_new_tokens=12, stop=[word])
    assert stopped.finish == "stop" and stopped.text == text[: text.index(word)]


def test_stream(engine):
    (whole,) = engine.generate(PROMPT, max_new_tokens=6)
    stream = engine.stream(PROMPT, max_new_tokens=6)
    events = list(stream)
    assert "".join(event.text for event in events) == whole.text
    assert [event.token for event in events if event.token >= 0] == whole.tokens
    assert [event.finish for event in events[:-1]] == ["none"] * (len(events) - 1) and events[-1].finish == "length"
    assert {event.request for event in events} == {stream.request} and list(stream) == [] and engine.idle


def test_streams_and_steps_side_by_side(engine):
    (whole,) = engine.generate(PROMPT, max_new_tokens=5)
    one, two = (engine.stream(PROMPT, max_new_tokens=5) for _ in range(2))
    own = engine.add(PROMPT, max_new_tokens=5)
    tokens = {own: [], one.request: [], two.request: []}
    for a, b in zip(one, two):
        tokens[one.request].append(a.token)
        tokens[two.request].append(b.token)
    while len(tokens[own]) < 5:
        for event in engine.step():
            assert event.request == own, "events of a stream go to the stream"
            tokens[own].append(event.token)
    assert set(map(tuple, tokens.values())) == {tuple(whole.tokens)} and engine.idle


def test_closing_a_stream_cancels(engine):
    with engine.stream(PROMPT, max_new_tokens=500, ignore_eos=True) as stream:
        next(stream)
    assert list(stream) == []
    engine.step()
    assert engine.idle
    engine.stream(PROMPT, max_new_tokens=500, ignore_eos=True)  # nobody keeps it
    engine.step()
    assert engine.idle


def test_cancel(engine):
    request = engine.add(PROMPT, max_new_tokens=500, ignore_eos=True)
    engine.step()
    engine.cancel(request)
    engine.cancel(10**9)
    events = engine.step()
    assert events[-1].request == request and events[-1].finish == "cancelled" and engine.idle


def test_callbacks(engine):
    seen = []

    def add_once(event):
        seen.append(event.token)
        if len(seen) == 1:
            seen_requests.append(engine.add(PROMPT, max_new_tokens=2))

    seen_requests = []
    (result,) = engine.generate(PROMPT, max_new_tokens=4, on_token=add_once)
    assert seen == result.tokens
    left = []
    while not engine.idle or not left:
        left += engine.step()
    assert {event.request for event in left} == set(seen_requests)
    asked = iter([False, False, True])
    (stopped,) = engine.generate(PROMPT, max_new_tokens=500, should_stop=lambda: next(asked, True))
    assert stopped.finish == "cancelled" and 0 < len(stopped.tokens) < 5


@pytest.mark.parametrize("name", ["on_token", "should_stop"])
def test_callbacks_that_raise(engine, name):
    def fail(*_):
        raise KeyError("from the callback")

    with pytest.raises(KeyError, match="from the callback"):
        engine.generate([PROMPT, PROMPT], max_new_tokens=50, **{name: fail})
    engine.step()
    assert engine.idle
    assert len(engine.generate(PROMPT, max_new_tokens=2)[0].tokens) == 2


def test_other_threads_run_while_a_step_works():
    made = fovea.Engine.load(MODELS / "llama", threads=1)
    ids = made.encode(PROMPT) * 40
    count, done = [0], threading.Event()

    def run():
        while not done.is_set():
            count[0] += 1
            time.sleep(0)  # lets the GIL go

    thread = threading.Thread(target=run)
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)  # nobody has to let the GIL go
    try:
        thread.start()
        at_start, deadline = count[0], time.monotonic() + 20
        while count[0] == at_start and time.monotonic() < deadline:
            made.add(ids, max_new_tokens=1)
            made.step()
        assert count[0] > at_start, "step() held the GIL"
    finally:
        done.set()
        sys.setswitchinterval(before)
        thread.join()


def test_calls_from_several_threads(engine):
    expected = engine.generate(PROMPT, max_new_tokens=6)[0].tokens
    results = []

    def run():
        results.append([event.token for event in engine.stream(PROMPT, max_new_tokens=6)])
        results.append(engine.generate(PROMPT, max_new_tokens=6)[0].tokens)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 8 and engine.idle


def test_prefix_cache_and_salt(engine):
    engine.clear_prefix_cache()
    long = PROMPT * 10
    counts = [engine.generate(long, max_new_tokens=1, salt=salt)[0].cached_tokens for salt in ("a", "a", "b")]
    assert counts[0] == counts[2] == 0 < counts[1]


def test_properties(engine):
    stats = engine.stats
    assert stats.steps > 0 and stats.memory.total >= stats.memory.weights > 0 and stats.kv_pages >= stats.kv_pages_free
    assert "MB" in stats.memory.explain() and stats.decode_seconds > 0
    assert engine.has_text and engine.vocabulary == 2048 and 0 < engine.max_context <= engine.wanted_context
    assert "cpu: chosen" in engine.explain() and isinstance(engine.notes, list)


def test_explain_does_not_load():
    assert "cpu: chosen" in fovea.explain(LLAMA)
    device = fovea.DeviceInfo(kind="cuda", name="H200", sm=90, cores=132)
    assert "chosen" in fovea.explain(LLAMA, device, kv_memory_bytes=1 << 30)
    with pytest.raises(fovea.Error, match="kv_memory_bytes"):
        fovea.explain(LLAMA, device)


def test_chat_needs_a_format(engine):
    with pytest.raises(fovea.Error) as info:
        engine.chat("Hello", max_new_tokens=2)
    assert info.value.code == "unsupported"
    with pytest.raises(fovea.Error):
        engine.encode_chat("Hello", "Be brief.")


def test_answers_follow_a_json_schema(engine):
    properties = {"b": {"type": "integer"}, "a": {"enum": ["x", "y"]}}
    schema = {"type": "object", "properties": properties, "required": ["b", "a"]}
    result = engine.generate(PROMPT, max_new_tokens=200, temperature=1, seed=3, json_schema=json.dumps(schema))[0]
    value = json.loads(result.text)
    assert list(value) == ["b", "a"] and isinstance(value["b"], int) and value["a"] in ("x", "y")
    with pytest.raises(fovea.Error, match="frog"):
        engine.add(PROMPT, json_schema='{"type": "frog"}')


def test_logits_are_changed(engine):
    (token,) = set(engine.generate(PROMPT, max_new_tokens=3, logit_bias={77: 100})[0].tokens)
    assert token == 77
    plain = engine.generate(PROMPT, max_new_tokens=12)[0].tokens
    assert engine.generate(PROMPT, max_new_tokens=12, frequency_penalty=2, repetition_penalty=2)[0].tokens != plain


def test_conversations(tmp_path):
    for file in LLAMA.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").symlink_to(MODELS.parent / "chat" / "qwen3.jinja")
    engine = fovea.Engine.load(tmp_path, kv_memory_bytes=1 << 24, threads=1)
    messages = [{"role": "user", "content": "Hello"}]
    tokens = engine.encode_conversation(messages)
    assert tokens == engine.encode_chat("Hello") == engine.encode_conversation(json.dumps(messages))
    tools = [{"type": "function", "function": {"name": "clock"}}]
    assert len(engine.encode_conversation(messages, tools)) > len(tokens)
    assert len(engine.encode_conversation(messages, variables={"enable_thinking": False})) > len(tokens)
    started = [*messages, {"role": "assistant", "content": "And"}]
    continued = engine.encode_conversation(started, continue_last_message=True)
    assert continued == engine.encode_conversation(started, add_generation_prompt=False)[: len(continued)]
    both = {"continue_last_message": True, "add_generation_prompt": True}
    for call, message in (
        (lambda: engine.encode_conversation(started, **both), "exclude"),
        (lambda: engine.encode_conversation([1]), r"messages\[0\]"),
        (lambda: engine.encode_conversation(messages, 3), "tools"),
        (lambda: engine.encode_conversation(messages, tool=3), "encode_conversation has no argument .*'tool'"),
        (lambda: engine.encode_conversation(messages, continue_last_message=3), "continue_last_message is 3"),
    ):
        with pytest.raises(fovea.Error, match=message):
            call()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda e: e.generate(3), "prompts is of type int, must be a list or array of integers"),
        (lambda e: e.generate([PROMPT, 3.5]), r"prompts\[1\] is of type float"),
        (lambda e: e.generate(PROMPT, 3), "sampling is of type int, must be a fovea._core.SamplingParams"),
        (lambda e: e.generate([PROMPT], [None, None]), "sampling has 2 entries, prompts 1"),
        (lambda e: e.generate(PROMPT, tokens=3), "SamplingParams has no field 'tokens', known: max_new_tokens"),
        (lambda e: e.generate(PROMPT, on_token=3), "on_token is of type int, must be callable"),
        (lambda e: e.generate(PROMPT, salt=3), "salt is 3, must be text"),
        (lambda e: e.generate(PROMPT, temperature=-1), "temperature is -1"),
        (lambda e: e.generate("\ud800"), "prompt"),
        (lambda e: e.add([]), "prompt is empty, must have a token"),
        (lambda e: e.add([10**6]), "1000000"),
        (lambda e: e.add([1] * 10**5), "100000"),
        (lambda e: e.cancel("x"), "request is 'x', must be an integer"),
        (lambda e: e.encode(3), "text is 3, must be text"),
        (lambda e: e.decode("x"), "tokens is of type str"),
        (lambda e: e.logits([-1]), "-1"),
    ],
)
def test_wrong_arguments_are_named(engine, call, message):
    with pytest.raises(fovea.Error, match=message) as info:
        call(engine)
    assert info.value.code == "invalid_argument" and engine.idle


@pytest.mark.parametrize(
    "path, options, code, message",
    [
        (3, {}, "invalid_argument", "path is 3, must be a path"),
        ("/nonexistent", {}, "io", "/nonexistent"),
        (LLAMA, {"page_size": 0}, "invalid_argument", "page_size is 0"),
        (LLAMA, {"pages": 3}, "invalid_argument", "EngineOptions has no field 'pages', known: random_weights"),
        (LLAMA, {"backend": 3}, "invalid_argument", "backend is 3, must be text"),
        (LLAMA, {"backend": "nothing"}, "invalid_argument", "nothing"),
        (LLAMA, {"kv_dtype": "int4"}, "invalid_argument", "kv_dtype is 'int4', known: fp32"),
        (LLAMA, {"device": "tpu"}, "invalid_argument", "tpu"),
    ],
)
def test_wrong_options_are_named(path, options, code, message):
    with pytest.raises(fovea.Error, match=message) as info:
        fovea.Engine.load(path, **options)
    assert info.value.code == code


def test_random_weights():
    shape = pathlib.Path(LLAMA / "config.json")
    engines = [fovea.Engine.load(shape, random_weights=seed, threads=2) for seed in (1, 1, 2)]
    assert not engines[0].has_text
    tokens = [made.generate([[1, 2, 3]], max_new_tokens=8)[0].tokens for made in engines]
    assert tokens[0] == tokens[1] != tokens[2]


def test_interrupt_ends_generate(engine):
    import _thread

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    threading.Timer(0.1, _thread.interrupt_main).start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            while time.monotonic() - begin < 30:
                engine.generate(PROMPT, max_new_tokens=400, ignore_eos=True)
    finally:
        signal.signal(signal.SIGINT, handler)
    engine.step()
    assert engine.idle
