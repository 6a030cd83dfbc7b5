# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client against the server."""
import json

import openai
import pytest

PROMPT = "And it came to pass in the days of"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who was Noah?"}]


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="a-key-for-tests", max_retries=0)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "fovea"


def test_completions(client):
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0, logprobs=2)
    choice = whole.choices[0]
    assert choice.finish_reason == "length" and len(choice.logprobs.tokens) == 9
    assert whole.usage.completion_tokens == 9 and whole.usage.prompt_tokens_details.cached_tokens == 0
    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0, stream=True,
                                            stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == choice.text
    assert chunks[-1].usage.completion_tokens == 9 and chunks[-1].choices == []


def test_chats(client):
    given = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 9, "temperature": 0, "logprobs": True,
             "top_logprobs": 3, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**given)
    message = whole.choices[0].message
    assert message.role == "assistant" and message.tool_calls is None
    assert [len(entry.top_logprobs) for entry in whole.choices[0].logprobs.content] == [3] * 9
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
    assert "".join(chunk.delta.content for chunk in chunks) == message.content
    assert chunks[0].delta.role == "assistant" and chunks[-1].finish_reason == "length"


def test_tools(client):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"day": {"enum": ["today", "tomorrow"]}}, "required": ["day"]}}}
    given = {"model": "tiny", "messages": MESSAGES, "tools": [tool], "tool_choice": "required", "seed": 3,
             "parallel_tool_calls": False, "max_tokens": 300}
    choice = client.chat.completions.create(**given).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["day"] in ("today", "tomorrow")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
    assert [part.function.name for part in parts if part.id] == ["weather"]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*MESSAGES, choice.message, result]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5)
    assert answer.choices[0].message.role == "assistant"


def test_answers_by_a_schema(client):
    schema = {"type": "object", "properties": {"z": {"type": "boolean"}, "a": {"enum": [1, 2]}}, "required": ["z", "a"],
              "additionalProperties": False}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=300, seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}})
    assert list(json.loads(answer.choices[0].message.content)) == ["z", "a"]


def test_a_stream_can_be_left(client, server):
    stream = client.completions.create(model="tiny", prompt="a", max_tokens=8000, stream=True,
                                       extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    headers = {"Authorization": "Bearer a-key-for-tests"}
    for _ in range(1000):
        if b"fovea_num_requests_running 0\n" in server.request("GET", "/metrics", None, headers)[2]:
            return
    raise AssertionError("the request still runs")


def test_errors(client, server):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt=PROMPT, n=500)
    assert refused.value.param == "n"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}])
    assert refused.value.param == "messages[0].content[0].type"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt=PROMPT)
    other = openai.OpenAI(base_url=client.base_url, api_key="another-key", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        other.models.list()
