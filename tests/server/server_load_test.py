# SPDX-License-Identifier: Apache-2.0
"""Many streams, too many requests, and hostile clients. FOVEA_TEST_SCALE=15 makes 10,000 streams and 60 s of overload.
Usage: server_load_test.py SOURCES FOVEA"""
import json
import multiprocessing
import os
import resource
import socket
import threading
import time
import unittest

from served import SECONDS, Served, Server, run_tests

SCALE = int(os.environ.get("FOVEA_TEST_SCALE", "1"))
LONG = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}


def bytes_of(body):
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


def resident_bytes(process):
    with open(f"/proc/{process.pid}/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def attack(port, end):
    """Keeps slow headers, slow bodies, endless chunks, broken texts and deep JSON coming, until `end` is set."""
    os.nice(19)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    slow = []
    for beginning in [b"GET / HTTP/1.1\r\nX: ", head + b"Content-Length: 60000\r\n\r\n{"] * 150:
        slow.append(socket.create_connection(("127.0.0.1", port)))
        slow[-1].sendall(beginning)
    chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    bodies = [b'{"prompt": "\xff\xfe"}', b"[" * 20000, b'{"a":' * 5000]
    bursts = [head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 40, b"GET /" + b"x" * 30000 + b" HTTP/1.1\r\n\r\n",
              *(head + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in bodies)]
    while not end.is_set():
        for connection in slow:
            try:
                connection.sendall(b"a")
            except OSError:
                pass  # the server has given up on it
        for burst in bursts:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                try:
                    connection.sendall(burst)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(4096)
                except OSError:
                    pass
        time.sleep(0.02)
    for connection in slow:
        connection.close()


class Load(unittest.TestCase):
    def serve(self, *flags):
        server = Server(Served.root, Served.program, *flags)
        self.addCleanup(server.stop)
        return server

    def seconds_of(self, request, times):
        """Returns the sorted times that a request takes."""
        taken = []
        for _ in range(times):
            start = time.monotonic()
            request()
            taken.append(time.monotonic() - start)
        return sorted(taken)

    def test_idle_streams_take_little_memory(self):
        """Streams that wait for their turn take at most 6.7 KB each: 64 MiB for 10,000."""
        count = min(10000, 2000 * SCALE)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        server = self.serve("--max-requests", "1", "--max-queue", str(2 * count), "--max-connections", str(2 * count))
        # Memory of the caches is touched first, because the stream that runs goes on meanwhile.
        for first in (0, 1000):
            server.post("/v1/completions", {"prompt": [first + i % 997 for i in range(8100)], "max_tokens": 1})
        server.request("POST", "/flush_cache")
        connections = []
        self.addCleanup(lambda: [connection.close() for connection in connections])
        start, data = time.monotonic(), bytes_of(LONG)
        before = 0
        # The first ones fill buffers that all share.
        for done in range(count + 200):
            if done == 200:
                server.wait_for_metric("fovea_num_requests_waiting", 199)
                before = resident_bytes(server.process)
            connections.append(server.connect())
            connections[-1].sendall(data)
        server.wait_for_metric("fovea_num_requests_waiting", count + 199)
        accepted = time.monotonic() - start
        grown = resident_bytes(server.process) - before
        health = self.seconds_of(lambda: server.request("GET", "/health"), 200)
        for connection in connections:
            connection.close()
        start = time.monotonic()
        server.wait_for_metric("fovea_num_requests_running", 0)
        server.wait_for_metric("fovea_num_requests_waiting", 0)
        print(f"{count} idle streams: accepted in {accepted:.1f} s, {grown / 2**20:.1f} MiB, /health p99 "
              f"{1000 * health[197]:.1f} ms, gone after {time.monotonic() - start:.1f} s", flush=True)
        self.assertLess(grown, count * 64 * 2**20 / 10000)

    def test_hostile_clients_do_not_slow_others(self):
        """A small request takes at most twice its time, and memory stays, while other clients misbehave."""
        server = self.serve("--max-body", "256KB")
        body = {"prompt": "And it came to pass", "max_tokens": 2, "temperature": 0}

        def p99():
            return self.seconds_of(lambda: server.post("/v1/completions", body), 300)[297]

        p99()
        end = multiprocessing.Event()
        attackers = [multiprocessing.Process(target=attack, args=(server.port, end), daemon=True) for _ in range(2)]
        alone, before = p99(), resident_bytes(server.process)
        for attacker in attackers:
            attacker.start()
        server.wait_for_metric('fovea_http_answers_total{status="413"}', lambda count: count > 0)
        crowded = p99()
        grown = resident_bytes(server.process) - before
        end.set()
        for attacker in attackers:
            attacker.join(SECONDS)
        answers = {status: server.metric(f'fovea_http_answers_total{{status="{status}"}}')
                   for status in (400, 413, 431)}
        print(f"a small request p99 {1000 * alone:.1f} ms, among hostile clients {1000 * crowded:.1f} ms; "
              f"{grown / 2**20:.1f} MiB; refused {answers}", flush=True)
        self.assertGreater(min(answers.values()), 0)
        self.assertLess(grown, 64 * 2**20)
        # Other programs of a busy machine take this much, too.
        self.assertLess(crowded, max(2 * alone, 0.05))

    def test_overload_is_refused_and_over_soon(self):
        """Clients without pause ask for ten times of what runs and waits; some are refused, none fails, and a request
        alone is as fast as before 5 s later."""
        server = self.serve("--max-requests", "2", "--max-queue", "6")
        body = {"prompt": "And it came to pass", "max_tokens": 32, "ignore_eos": True, "temperature": 0}
        alone = self.seconds_of(lambda: server.post("/v1/completions", body), 10)[5]
        answers = {200: 0, 429: 0}
        wrong = []
        seconds = min(60, 4 * SCALE)
        end = time.monotonic() + seconds

        def ask():
            while time.monotonic() < end:
                status, headers, text = server.request("POST", "/v1/completions", body)
                if status not in answers or (status == 429 and headers.get("retry-after") != "1"):
                    wrong.append((status, text))
                    return
                answers[status] += 1

        threads = [threading.Thread(target=ask) for _ in range(80)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS + seconds)
        start = time.monotonic()
        recovered = None
        while recovered is None and time.monotonic() < start + SECONDS:
            if self.seconds_of(lambda: server.post("/v1/completions", body), 3)[1] < max(2 * alone, 0.2):
                recovered = time.monotonic() - start
        print(f"80 clients over 8 places: {answers[200]} answers, {answers[429]} refused; a request alone takes "
              f"{1000 * alone:.0f} ms, and again after {recovered or -1:.1f} s", flush=True)
        self.assertEqual(wrong, [])
        self.assertGreater(answers[200], 8)
        self.assertGreater(answers[429], 8)
        self.assertIsNotNone(recovered)
        self.assertLess(recovered, 5)
        server.wait_for_metric("fovea_num_requests_running", 0)


if __name__ == "__main__":
    run_tests()
