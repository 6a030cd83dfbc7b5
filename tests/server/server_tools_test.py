# SPDX-License-Identifier: Apache-2.0
"""Chats with tools against `fovea serve`. Usage: server_tools_test.py SOURCES FOVEA"""
import json

from served import Served, run_tests

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "day": {"type": "integer", "minimum": 1,
                                                                              "maximum": 7}},
        "required": ["unit", "day"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


class Tools(Served):
    template = "qwen2_5"

    def chat(self, **fields):
        return {"messages": [{"role": "user", "content": "How is the weather?"}], "max_tokens": 200, "temperature": 1,
                "seed": 7, "tools": TOOLS} | fields

    def collect(self, body):
        """Returns the message and the end of a stream, put together as clients do."""
        message, finish = {"content": "", "tool_calls": []}, None
        *events, end = self.server.stream("/v1/chat/completions", body)
        self.assertEqual(end, "[DONE]")
        for event in events:
            choice = json.loads(event)["choices"][0]
            message["content"] += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls", []):
                if part["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
                message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
            finish = choice["finish_reason"] or finish
        return message, finish

    def test_forced_calls_fit_their_schema(self):
        for choice in ("required", NAMED):
            body = self.chat(tool_choice=choice, parallel_tool_calls=False)
            whole = self.server.post("/v1/chat/completions", body)["choices"][0]
            self.assertEqual(whole["finish_reason"], "tool_calls", whole)
            self.assertIsNone(whole["message"]["content"])
            (call,) = whole["message"]["tool_calls"]
            self.assertIn(call["function"]["name"], ("weather", "clock"))
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "weather":
                self.assertIn(arguments["unit"], ("C", "F"))
                self.assertIn(arguments["day"], range(1, 8))
                self.assertEqual(list(arguments), ["unit", "day"])
            else:
                self.assertEqual(arguments, {})
            message, finish = self.collect(body)
            self.assertEqual(finish, "tool_calls")
            self.assertEqual(message["content"], "")
            self.assertEqual([(c["name"], c["arguments"]) for c in message["tool_calls"]],
                             [(call["function"]["name"], call["function"]["arguments"])])

    def test_a_conversation_goes_on_after_a_call(self):
        body = self.chat(tool_choice="required", parallel_tool_calls=False)
        message = self.server.post("/v1/chat/completions", body)["choices"][0]["message"]
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
        messages = [*body["messages"], message, answer]
        choice = self.server.post("/v1/chat/completions", self.chat(messages=messages, max_tokens=5))["choices"][0]
        self.assertIn(choice["finish_reason"], ("stop", "length"))
        tokens = self.server.post("/tokenize", {"messages": messages, "tools": TOOLS})["tokens"]
        text = "".join(self.server.post("/tokenize", {"messages": messages, "tools": TOOLS,
                                                      "return_token_strs": True})["token_strs"])
        self.assertIn("<tool_response>\nrain\n</tool_response>", text)
        usage = self.server.post("/v1/chat/completions", self.chat(messages=messages, max_tokens=1))["usage"]
        self.assertEqual(usage["prompt_tokens"], len(tokens))

    def test_the_last_message_is_continued(self):
        messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "1, 2,"}]
        fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        tokens = self.server.post("/tokenize", fields)["tokens"]
        chat = self.server.post("/v1/chat/completions", fields | {"max_tokens": 6, "temperature": 0})
        text = self.server.post("/v1/completions", {"prompt": tokens, "max_tokens": 6, "temperature": 0})
        self.assertEqual(chat["choices"][0]["message"]["content"], text["choices"][0]["text"])

    def test_unknown_functions_are_refused(self):
        body = self.chat(tool_choice={"type": "function", "function": {"name": "other"}})
        status, _, text = self.server.request("POST", "/v1/chat/completions", body)
        self.assertEqual(status, 400)
        self.assertEqual(json.loads(text)["error"]["param"], "tool_choice")


if __name__ == "__main__":
    run_tests()
