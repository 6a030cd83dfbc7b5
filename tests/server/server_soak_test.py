# SPDX-License-Identifier: Apache-2.0
"""Random requests from more clients than `fovea serve` has places for: fields of every kind and value, broken JSON,
broken HTTP, and clients that leave at any moment. The server answers every whole request, with an error that names
nothing of the machine or of others' prompts, never exits, and keeps no page, request or connection. However slow the
machine is, a client waits for its answer until some minutes after the end, and goes on after a wrong one.
FOVEA_SOAK_SECONDS=1800 runs half an hour. Usage: server_soak_test.py SOURCES FOVEA"""
import collections
import json
import os
import random
import re
import threading
import time
import unittest

from served import SECONDS, Served, Server, run_tests

DURATION = float(os.environ.get("FOVEA_SOAK_SECONDS", "10"))
CLIENTS = 20
PATIENCE = 5 * SECONDS  # after the end, for the last answers
SECRET = "canary of another client"
STATUSES = {200, 400, 404, 405, 413, 429, 431}

WRONG = ["null", "-1", "0", "1", "1.5", "2147483648", "1e308", "-1e308", "1e999", "NaN", '"x"', '""', "[]", "{}",
         "[[]]", "[null]", "true", "false", '"\\ud800"', "18446744073709551616", "[" * 70 + "]" * 70,
         '{"a": 1, "a": 2}']
SCHEMAS = ['{"type": "object"}', '{"type": "integer"}', '{"enum": ["a", 1]}', '{"$ref": "#"}', '{"type": "frog"}',
           '{"$ref": "http://127.0.0.1:1/s"}', '{"type": "array", "items": {"$ref": "#"}, "maxItems": 3}',
           '{"type": "string", "maxLength": 100000}', '{"type": "object", "properties": {"a": {"type": "null"}}}']
FUNCTION = '{"type": "function", "function": {"name": "f", "parameters": %s}}'
FIELDS = {
    "model": ['"tiny"', '"other"'], "n": ["1", "2", "5", "128"], "best_of": ["3"], "echo": ["true"],
    "max_tokens": ["1", "8", "40", "400"], "temperature": ["0", "0.7", "100"], "top_p": ["0.5", "1e-6"],
    "top_k": ["-1", "1", "40"], "min_p": ["0.1"], "presence_penalty": ["2"], "frequency_penalty": ["-2"],
    "repetition_penalty": ["0.01", "100"], "logit_bias": ['{"5": 100, "6": -100}', '{"5": "x"}', '{"9999": 1}'],
    "seed": ["7", "-9223372036854775808"], "stop": ['"a"', '["b", "\\n"]', '["' + "x" * 2000 + '"]'],
    "stop_token_ids": ["[5, 6]", "[-1]"], "ignore_eos": ["true"], "min_tokens": ["3"], "stream": ["true", "false"],
    "stream_options": ['{"include_usage": true}', '{"continuous_usage_stats": true}'],
    "logprobs": ["0", "5", "20", "true"], "top_logprobs": ["3"], "prompt_logprobs": ["0", "20"],
    "return_token_ids": ["true"], "return_tokens_as_token_ids": ["true"], "cache_salt": ['"s"'],
    # A request of priority 3600 waits for an hour, as long as others come.
    "priority": ["-3600", "-1", "3"], "add_special_tokens": ["false"], "truncate_prompt_tokens": ["4", "-1"],
    "response_format": ['{"type": "json_object"}']
    + ['{"type": "json_schema", "json_schema": {"schema": %s}}' % schema for schema in SCHEMAS],
    "structured_outputs": ['{"json": %s}' % schema for schema in SCHEMAS] + ['{"regex": "a"}'],
    "tools": ["[%s]" % (FUNCTION % schema) for schema in SCHEMAS] + ["[%s]" % ", ".join([FUNCTION % "{}"] * 3)],
    "tool_choice": ['"none"', '"auto"', '"required"', '{"type": "function", "function": {"name": "f"}}'],
    "chat_template": ['"{{ 1 }}"'], "chat_template_kwargs": ['{"enable_thinking": false}'], "documents": ['["a"]'],
    "continue_final_message": ["true"], "skip_special_tokens": ["false"], "frobnicate": ["1"], "suffix": ['"s"'],
}
TEXTS = ['"And it came to pass"', '"a"', '"\\u0000"', '"<|eos|><|bos|>"', json.dumps(SECRET), '"' + "word " * 300 + '"']
PROMPTS = [*TEXTS, "[5, 6, 7]", '["a", "b"]', "[[5], [6]]", "[5, -1]", json.dumps(list(range(64, 700)))]
CONTENTS = [*TEXTS, "null", '[{"type": "text", "text": "a"}]',
            '[{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]',
            '[{"type": "file", "file": {"file_id": "file:///etc/passwd"}}]']
ROLES = ['"user"', '"assistant"', '"system"', '"tool"', '"developer"', '"robot"']
PATHS = {"/v1/completions": 10, "/v1/chat/completions": 10, "/tokenize": 3, "/detokenize": 2, "/v1/models": 1,
         "/health": 1, "/metrics": 1, "/server_info": 1, "/flush_cache": 1, "/tokenizer_info": 1, "/": 1,
         "/v1/models/tiny": 1, "/v1/models/..%2f..": 1, "/../../etc/passwd": 1, "/v1/embeddings": 1}


class Client(threading.Thread):
    """Sends random requests until a time."""

    def __init__(self, server, seed, end, counts):
        super().__init__()
        self.server, self.random, self.end, self.counts = server, random.Random(seed), end, counts
        self.wrong = []  # requests, and what was wrong with their answers
        self.ended_at = None

    def run(self):
        while len(self.wrong) < 10 and time.monotonic() < self.end and self.server.process.poll() is None:
            request, is_whole = self.request()
            begin = time.monotonic()
            try:
                answer = self.exchange(request, is_whole)
                wrong = answer is not None and self.is_wrong(request, answer, is_whole)
            except Exception as error:  # noqa: BLE001: nothing ends a client unnoticed
                self.counts[type(error).__name__] += 1
                answer = repr(error)
                wrong = is_whole and not isinstance(error, ConnectionError)
            if wrong:
                self.wrong.append((request, answer, f"after {time.monotonic() - begin:.1f} s"))
        self.ended_at = time.monotonic()

    def pick(self, values):
        return self.random.choice(values)

    def value(self, values):
        return self.pick(WRONG) if self.random.random() < 0.15 else self.pick(values)

    def message(self):
        members = [f'"role": {self.value(ROLES)}', f'"content": {self.value(CONTENTS)}']
        if self.random.random() < 0.2:
            call = '{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}'
            members.append(f'"tool_calls": {self.value(["[%s]" % call])}')
        return "{%s}" % ", ".join(members)

    def body(self, path):
        """Returns the JSON of a request, nearly always well formed."""
        members = []
        if "chat" in path or (path == "/tokenize" and self.random.random() < 0.5):
            messages = ", ".join(self.message() for _ in range(self.random.randrange(1, 4)))
            members.append(f'"messages": {self.value(["[%s]" % messages])}')
        elif path == "/detokenize":
            members.append(f'"tokens": {self.value(PROMPTS)}')
        else:
            members.append(f'"prompt": {self.value(PROMPTS)}')
        # Without a limit a chat would fill the context.
        members.append(f'"max_tokens": {self.pick(FIELDS["max_tokens"])}')
        for name in self.random.sample(sorted(FIELDS), self.random.choice((0, 1, 2, 3, 6))):
            if name != "max_tokens":
                members.append(f'"{name}": {self.value(FIELDS[name])}')
        self.random.shuffle(members)
        text = "{%s}" % ", ".join(members)
        if self.random.random() < 0.1:
            place = self.random.randrange(len(text))
            text = text[:place] + self.pick(["", "\x00", "}", '"', "[", "\\", "é", "9" * 400]) + text[place + 1:]
        return text.encode()

    def request(self):
        """Returns the bytes of a request, and whether the server must answer it."""
        path = self.random.choices(list(PATHS), PATHS.values())[0]
        is_post = path.startswith(("/v1/c", "/token", "/detoken", "/flush")) and path != "/tokenizer_info"
        method = "POST" if is_post else "GET"
        if self.random.random() < 0.05:
            method = self.pick(["PUT", "GET", "POST", "X"])
        data = self.body(path) if method == "POST" else b""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        if self.random.random() < 0.2 and data:
            lines.append("Transfer-Encoding: chunked")
            cut = self.random.randrange(1, len(data) + 1)
            pieces = [piece for piece in (data[:cut], data[cut:]) if piece]
            data = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        else:
            lines.append(f"Content-Length: {len(data)}")
        if self.random.random() < 0.02:
            lines.append("X: " + "x" * self.pick([100, 20000]))
        request = "\r\n".join([*lines, "", ""]).encode() + data
        if self.random.random() < 0.04:
            place = self.random.randrange(len(request))
            return request[:place] + self.random.randbytes(self.random.randrange(1, 9)) + request[place + 1:], False
        if self.random.random() < 0.06:
            return request[: self.random.randrange(len(request))], False
        return request, True

    def exchange(self, request, is_whole):
        """Returns the answer, or nothing if the client leaves before its end."""
        stays = is_whole and self.random.random() < 0.75
        with self.server.connect() as connection:
            connection.settimeout(PATIENCE)
            connection.sendall(request)
            if not stays:
                connection.settimeout(max(self.random.random() * 0.05, 0.001))
            answer = b""
            while True:
                if stays:
                    connection.settimeout(max(self.end - time.monotonic(), 0) + PATIENCE)
                try:
                    piece = connection.recv(65536)
                except TimeoutError:
                    if stays:
                        raise
                    self.counts["left"] += 1
                    return None
                answer += piece
                if not piece:
                    return answer

    def is_wrong(self, request, answer, is_whole):
        match = re.match(rb"HTTP/1\.1 (\d+) ", answer)
        if match is None:
            self.counts["no answer"] += 1
            return is_whole
        status = int(match.group(1))
        self.counts[status] += 1
        if is_whole and status not in STATUSES:
            return True
        if status >= 400:
            head, _, body = answer.partition(b"\r\n\r\n")
            error = json.loads(body)["error"]
            if set(error) != {"message", "type", "param", "code"} or error["code"] != status:
                return True
            # A schema's error quotes the client's own text, and has JSON pointers, which begin with '#'.
            message = re.sub(r"#/[^\s'\"]*", "", error["message"])
            shown = re.findall(rf"0x[0-9a-f]{{6,}}|/[a-z][^\s'\";]*|{SECRET}", message)
            sent = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", request)  # without the borders of chunks
            return any(text.encode() not in sent and text != "/v1/models" for text in shown)
        return b"text/event-stream" in answer and (
            b'data: {"error"' in answer or not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"))


def resident_mib(process):
    with open(f"/proc/{process.pid}/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


class Soak(unittest.TestCase):
    def test_random_requests(self):
        server = Server(Served.root, Served.program, "--max-requests", "4", "--max-queue", "12", "--max-body", "64KB",
                        template="qwen2_5")
        self.addCleanup(lambda: server.process.poll() is None and server.process.kill())
        counts = collections.Counter()
        begin = time.monotonic()
        seed = random.randrange(2**32)
        clients = [Client(server, seed + i, begin + DURATION, counts) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        # By then the engine has kept as many grammars as it keeps.
        time.sleep(DURATION / 2)
        warm = resident_mib(server.process)
        for client in clients:
            client.join()
        text = ", ".join(f"{name}: {count}" for name, count in sorted(counts.items(), key=lambda item: str(item[0])))
        print(f"{time.monotonic() - begin:.0f} s, seed {seed}: {sum(counts.values())} requests ({text})", flush=True)
        self.assertIsNone(server.process.poll(), f"the server is gone, seed {seed}")
        wrong = [tuple(text[:400] for text in found) for client in clients for found in client.wrong]
        self.assertEqual(len(wrong), 0, f"seed {seed}: {wrong[:10]}")
        self.assertTrue(all(client.ended_at >= client.end for client in clients), f"seed {seed}: a client ended early")
        server.wait_for_metric("fovea_num_requests_running", 0)
        server.wait_for_metric("fovea_num_requests_waiting", 0)
        server.wait_for_metric("fovea_http_connections", 1)
        self.assertEqual(server.request("POST", "/flush_cache")[0], 200)
        server.wait_for_metric("fovea_kv_cache_usage_ratio", 0)
        self.assertEqual(server.metric("fovea_failed_passes_total"), 0)
        last = resident_mib(server.process)
        aborted = server.metric('fovea_requests_total{finish_reason="abort"}')
        code, errors = server.stop()
        self.assertEqual((code, errors), (0, ""))
        print(f"{aborted:.0f} cancelled, {warm:.1f} MiB of memory after {DURATION / 2:.0f} s, {last:.1f} MiB at the end",
              flush=True)
        self.assertLess(last - warm, 64)
        self.assertGreater(counts[200], 10)
        self.assertGreater(counts[400], 10)


if __name__ == "__main__":
    run_tests()
