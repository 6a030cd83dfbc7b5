# SPDX-License-Identifier: Apache-2.0
"""Tests that times tell clients of `fovea serve` no secret, and that no request makes it reach outside.
FOVEA_TEST_SCALE=40 compares as many times as docs/testing.md wants. Usage: server_security_test.py SOURCES FOVEA"""
import http.client
import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
import unittest

from served import SECONDS, Served, Server, run_tests

SCALE = int(os.environ.get("FOVEA_TEST_SCALE", "1"))
NO_OUTSIDE = os.environ.get("FOVEA_NO_OUTSIDE")


def p_value(first, second):
    """Returns the probability of such different means by chance (Welch's test), without the slowest of all."""
    limit = sorted(first + second)[int(0.95 * len(first + second))]
    groups = [[value for value in group if value <= limit] for group in (first, second)]
    means = [sum(group) / len(group) for group in groups]
    errors = [sum((value - mean) ** 2 for value in group) / (len(group) - 1) / len(group)
              for group, mean in zip(groups, means)]
    return math.erfc(abs(means[0] - means[1]) / math.sqrt(2 * sum(errors)))


def area(faster, slower):
    """Returns the probability that a value of the first list is smaller than one of the second (AUC)."""
    ranked = sorted([(value, 0) for value in faster] + [(value, 1) for value in slower])
    ranks = sum(rank for rank, (_, group) in enumerate(ranked, 1) if group == 0)
    return 1 - (ranks - len(faster) * (len(faster) + 1) / 2) / (len(faster) * len(slower))


class Statistics(unittest.TestCase):
    def test_differences_are_seen(self):
        pick = random.Random(1)
        base = [pick.gauss(100, 10) for _ in range(2000)]
        self.assertGreater(p_value(base, [pick.gauss(100, 10) for _ in range(2000)]), 1e-4)
        self.assertLess(p_value(base, [pick.gauss(103, 10) for _ in range(2000)]), 1e-4)
        self.assertAlmostEqual(area(base, base), 0.5, delta=0.01)
        self.assertGreater(area(base, [value + 20 for value in base]), 0.9)


class Keys(Served):
    keys = ("a-key-of-32-bytes-for-this-test!",)

    def times(self, keys, count):
        """Returns the time of each request, by its key; the order is random."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=SECONDS)
        self.addCleanup(connection.close)
        taken = {key: [] for key in keys}
        order = [key for key in keys for _ in range(count)]
        random.shuffle(order)
        for key in order:
            begin = time.perf_counter_ns()
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
            connection.getresponse().read()
            taken[key].append(time.perf_counter_ns() - begin)
        return [taken[key] for key in keys]

    def test_times_tell_nothing_about_a_key(self):
        key = self.keys[0]
        wrong = ("X" + key[1:], key[:-1] + "X")
        p = p_value(*self.times(wrong, 1250 * SCALE))
        print(f"{2500 * SCALE} requests, wrong in the first or in the last byte: p = {p:.3f}", flush=True)
        self.assertGreater(p, 1e-4)


class Salts(Served):
    def seconds_to_token(self, tokens, salt):
        begin = time.perf_counter()
        answer = self.server.post("/v1/completions", {"prompt": tokens, "max_tokens": 1, "cache_salt": salt})
        return time.perf_counter() - begin, answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def test_times_tell_nothing_about_prompts_of_another_salt(self):
        count, pick = 60 * SCALE, random.Random(1)
        times = {"other": [], "new": [], "own": []}
        for _ in range(count):
            secret, fresh = ([pick.randrange(64, 2000) for _ in range(300)] for _ in range(2))
            self.seconds_to_token(secret, "victim")
            probes = [("other", secret, "attacker"), ("new", fresh, "attacker")]
            pick.shuffle(probes)
            for name, tokens, salt in [*probes, ("own", secret, "victim")]:
                seconds, cached = self.seconds_to_token(tokens, salt)
                times[name].append(seconds)
                self.assertEqual(cached > 0, name == "own")
        error = math.sqrt((2 * count + 1) / 12) / count
        across, same = area(times["other"], times["new"]), area(times["own"], times["new"])
        print(f"{count} prompts: AUC across salts {across:.3f} (error {error:.3f}), with the same salt {same:.3f}",
              flush=True)
        self.assertLess(abs(across - 0.5), max(0.05, 4 * error))
        self.assertGreater(same, 0.8)


@unittest.skipUnless(NO_OUTSIDE, "needs FOVEA_NO_OUTSIDE")
class Outside(unittest.TestCase):
    """No request makes the server open a file, start a program or connect to anything."""

    def test_the_library_ends_a_server_that_does(self):
        for attempt in ("socket.create_connection(('127.0.0.1', 9))", "open('/etc/passwd')", "os.fork()"):
            done = subprocess.run([sys.executable, "-c", "import os, socket; socket.create_server(('127.0.0.1', 0)); "
                                   + attempt], env=os.environ | {"LD_PRELOAD": NO_OUTSIDE}, capture_output=True,
                                  check=False)
            self.assertIn(b"no_outside: ", done.stderr)

    def test_requests_reach_nothing(self):
        server = Server(Served.root, Served.program, environment={"LD_PRELOAD": NO_OUTSIDE}, template="qwen2_5")
        self.addCleanup(lambda: server.process.poll() is None and server.process.kill())
        trap = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(trap.close)
        visits = []

        def wait():
            try:
                while True:
                    visits.append(trap.accept()[1])
            except OSError:
                pass

        threading.Thread(target=wait, daemon=True).start()
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x"
        for place in (url, "file:///etc/passwd", "/etc/passwd", "../../etc/passwd", url.replace("//", "\\\\")):
            parts = [{"type": "image_url", "image_url": {"url": place}}, {"type": "input_audio", "input_audio": place},
                     {"type": "file", "file": {"file_data": place}}, {"type": "video_url", "video_url": {"url": place}}]
            chat = {"messages": [{"role": "user", "content": place}], "max_tokens": 1}
            for part in parts:
                status, _, body = server.request("POST", "/v1/chat/completions", chat | {
                    "messages": [{"role": "user", "content": [part]}]})
                self.assertEqual((status, json.loads(body)["error"]["param"]), (400, "messages[0].content[0].type"))
            for name in ("chat_template", "prompt_embeds", "kv_transfer_params", "web_search_options", "audio"):
                status, _, body = server.request("POST", "/v1/chat/completions", chat | {name: place})
                self.assertEqual((status, json.loads(body)["error"]["param"]), (400, name))
            schema = {"type": "json_schema", "json_schema": {"schema": {"$ref": place}}}
            status, _, body = server.request("POST", "/v1/chat/completions", chat | {"response_format": schema})
            self.assertEqual((status, json.loads(body)["error"]["param"]), (400, "response_format"))
            server.post("/v1/chat/completions", chat | {
                "documents": [{"url": place}], "metadata": {"url": place}, "user": place, "chat_template_kwargs": {
                    "url": place}, "tools": [{"type": "function", "function": {"name": "f", "description": place}}]})
            server.request("GET", place, headers={"Host": "localhost"})
        *events, end = server.stream("/v1/completions", {"prompt": "a", "max_tokens": 4})
        self.assertEqual(end, "[DONE]")
        code, errors = server.stop()
        self.assertEqual((code, errors, visits), (0, "", []))


if __name__ == "__main__":
    run_tests()
