# SPDX-License-Identifier: Apache-2.0
"""Limits of `fovea serve`: bad input, gone and slow clients, a full queue, keys, the end.
Usage: server_limits_test.py SOURCES FOVEA"""
import json
import re
import socket
import struct
import threading
import time
import unittest

from served import SECONDS, Served, Server, run_tests

LONG = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "temperature": 0}


def status_of(answer):
    match = re.match(rb"HTTP/1\.1 (\d+) ", answer)
    return int(match.group(1)) if match else None


def post(path, body, *headers):
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class Limits(Served):
    flags = ("--max-body", "64KB", "--max-requests", "2", "--max-queue", "8")

    def tearDown(self):
        """Whatever a client did, the server answers, and nothing is left in the engine."""
        self.server.wait_for_metric("fovea_num_requests_running", 0)
        self.server.wait_for_metric("fovea_num_requests_waiting", 0)
        self.assertEqual(self.server.request("POST", "/flush_cache")[0], 200)
        self.server.wait_for_metric("fovea_kv_cache_usage_ratio", 0)
        self.assertEqual(self.server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})["object"],
                         "text_completion")

    def refused(self, status, param, method, path, body=None):
        got, headers, text = self.server.request(method, path, body)
        self.assertEqual(got, status, text)
        error = json.loads(text)["error"]
        self.assertEqual(set(error), {"message", "type", "param", "code"})
        self.assertEqual((error["param"], error["code"]), (param, status))
        self.assertNotIn("/", error["message"].replace("/v1/models", ""))
        return headers

    def test_unknown_paths_and_methods(self):
        self.refused(404, None, "GET", "/v1/nothing")
        self.refused(404, None, "GET", "/../etc/passwd")
        headers = self.refused(405, None, "GET", "/v1/completions")
        self.assertEqual(headers["allow"], "POST")
        self.refused(405, None, "GET", "/flush_cache")
        self.refused(404, "model", "POST", "/v1/completions", {"prompt": "a", "model": "gpt-9"})

    def test_bodies(self):
        self.refused(400, None, "POST", "/v1/completions", b"{")
        self.refused(400, None, "POST", "/v1/completions", b'{"prompt": "\xff"}')
        self.refused(400, None, "POST", "/v1/completions", b"[" * 10000)
        self.refused(400, "n", "POST", "/v1/completions", {"prompt": "a", "n": -1})
        self.refused(400, "prompt", "POST", "/v1/completions", {"prompt": [1] * 9000})
        self.refused(400, "messages[0].content[0].type", "POST", "/v1/chat/completions", {"messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}]})
        self.refused(400, "chat_template", "POST", "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"})
        self.refused(400, "tokens", "POST", "/detokenize", {"tokens": [-1]})
        self.refused(400, "prompt", "POST", "/tokenize", {"prompt": 5})

    def test_too_much(self):
        cases = {
            413: [post("/v1/completions", b"x" * 70000),
                  b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
                  + b"1000\r\n" + b"x" * 4096 + b"\r\n" + (b"1000\r\n" + b"x" * 4096 + b"\r\n") * 20],
            431: [b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20000 + b"\r\n\r\n",
                  b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\n\r\n"],
            400: [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
                  post("/v1/completions", b"", "Content-Length: 5"), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"],
        }
        for status, requests in cases.items():
            for request in requests:
                answer = self.server.raw(request)
                self.assertEqual(status_of(answer), status, (request[:60], answer[:200]))
                self.assertIn(b'"error"', answer)

    def test_slow_header(self):
        with self.server.connect() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n")
            received = b""
            while piece := connection.recv(4096):
                received += piece
            self.assertEqual(status_of(received), 408)

    def wait_until_idle(self):
        for kind in ("waiting", "running"):
            self.server.wait_for_metric(f"fovea_num_requests_{kind}", 0)

    def test_gone_clients_free_their_pages(self):
        aborted = 'fovea_requests_total{finish_reason="abort"}'
        self.wait_until_idle()  # earlier tests leave clients that are gone
        before = self.server.metric(aborted)
        for stream in (False, True):
            connections = []
            for _ in range(4):
                connection = self.server.connect()
                connection.sendall(post("/v1/completions", json.dumps(LONG | {"stream": stream, "n": 2}).encode()))
                connections.append(connection)
            self.server.wait_for_metric("fovea_num_requests_running", 2)
            self.server.wait_for_metric("fovea_num_requests_waiting", 6)  # the server has read all
            if stream:
                self.assertIn(b"200 OK", connections[0].recv(4096))
            for connection in connections:
                connection.close()
            start = time.monotonic()
            self.wait_until_idle()
            self.assertLess(time.monotonic() - start, SECONDS / 4)
        self.server.wait_for_metric(aborted, before + 16)

    def test_a_client_that_goes_during_a_write_is_counted(self):
        aborted = 'fovea_requests_total{finish_reason="abort"}'
        self.wait_until_idle()
        before = self.server.metric(aborted)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        connection.connect(("127.0.0.1", self.server.port))
        body = LONG | {"stream": True, "logprobs": 20, "n": 2}
        connection.sendall(post("/v1/completions", json.dumps(body).encode()))
        self.server.wait_for_metric("fovea_num_requests_running", 2)
        time.sleep(2)  # no buffer has room any more
        connection.close()
        self.wait_until_idle()
        self.server.wait_for_metric(aborted, before + 2)

    def test_a_full_queue_refuses(self):
        body = json.dumps(LONG).encode()
        connections = [self.server.connect() for _ in range(10)]
        try:
            for running, connection in enumerate(connections, 1):
                connection.sendall(post("/v1/completions", body))
                if running <= 2:
                    self.server.wait_for_metric("fovea_num_requests_running", running)
            self.server.wait_for_metric("fovea_num_requests_waiting", 8)
            headers = self.refused(429, None, "POST", "/v1/completions", {"prompt": "a"})
            self.assertEqual(headers["retry-after"], "1")
            self.refused(400, "n", "POST", "/v1/completions", {"prompt": "a", "n": 9})
            start = time.monotonic()
            self.assertEqual(self.server.request("GET", "/health")[0], 200)
            self.assertLess(time.monotonic() - start, 5)
        finally:
            for connection in connections:
                connection.close()

    def test_pipelined_requests(self):
        request = post("/tokenize", b'{"prompt": "a"}')
        answer = self.server.raw(request * 3 + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        self.assertEqual(answer.count(b"HTTP/1.1 200 OK"), 4)

    def test_http_1_0_streams_end_with_the_connection(self):
        body = json.dumps(LONG | {"max_tokens": 2, "stream": True}).encode()
        answer = self.server.raw(post("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        self.assertTrue(answer.endswith(b"data: [DONE]\n\n"), answer[-100:])
        self.assertNotIn(b"chunked", answer.lower())

    def test_large_bodies_may_wait_for_a_sign(self):
        body = b'{"prompt": "a"}'
        with self.server.connect() as connection:
            connection.sendall(post("/tokenize", b"", "Expect: 100-continue", "Connection: close").replace(
                b"Content-Length: 0", b"Content-Length: %d" % len(body)))
            self.assertIn(b"100 Continue", connection.recv(4096))
            connection.sendall(body)
            received = b""
            while piece := connection.recv(4096):
                received += piece
        self.assertEqual(status_of(received), 200)

    def test_pages_of_other_sites_are_refused(self):
        body = {"prompt": "a", "max_tokens": 1}
        for headers, status in (({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403),
                                ({"Host": "evil.example"}, 403), ({"Host": "localhost:1"}, 200),
                                ({"Host": "[::1]:8000"}, 200),
                                ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200)):
            self.assertEqual(self.server.request("POST", "/v1/completions", body, headers)[0], status, headers)


class Keys(Served):
    keys = ("first-secret-key", "second-secret-key")

    def test_keys(self):
        body = {"prompt": "a", "max_tokens": 1}
        for header, status in ((None, 401), ("Bearer wrong-key", 401), ("second-secret-key", 401),
                               ("Bearer first-secret-key", 200), ("Bearer second-secret-key", 200)):
            headers = {"Authorization": header} if header else {}
            got, answer, text = self.server.request("POST", "/v1/completions", body, headers)
            self.assertEqual(got, status)
            if status == 401:
                self.assertEqual(answer["www-authenticate"], "Bearer")
                self.assertEqual(json.loads(text)["error"]["type"], "authentication_error")
            self.assertEqual(self.server.request("GET", "/metrics", None, headers)[0], status)
        self.assertEqual(self.server.request("GET", "/health")[0], 200)
        self.assertEqual(self.server.request("GET", "/")[0], 200)


class Ends(unittest.TestCase):
    def end(self, flags, signals):
        """Returns the text of a stream during which the server gets signals, and the server's exit code."""
        server = Server(Served.root, Served.program, *flags)
        received = []
        body = LONG | ({} if "0" in flags else {"max_tokens": 300})
        first = threading.Event()

        def read():
            for event in server.stream("/v1/completions", body):
                received.append(event)
                first.set()

        def read_until_closed():
            try:
                read()
            except (OSError, EOFError, ValueError):
                pass
            except Exception as error:  # http.client's IncompleteRead
                self.assertEqual(type(error).__name__, "IncompleteRead")

        thread = threading.Thread(target=read_until_closed)
        thread.start()
        self.assertTrue(first.wait(SECONDS))
        for _ in range(signals):
            server.process.terminate()
            time.sleep(0.05)
        thread.join()
        code, errors = server.stop(how=None)
        self.assertEqual(errors, "")
        return received, code

    def test_a_signal_lets_requests_finish(self):
        received, code = self.end((), 1)
        self.assertEqual(code, 0)
        self.assertEqual(received[-1], "[DONE]")
        self.assertEqual(len(received), 301)

    def test_a_signal_right_after_the_start_ends_the_server(self):
        for _ in range(3):
            code, errors = Server(Served.root, Served.program).stop()
            self.assertEqual((code, errors), (0, ""))

    def test_the_end_comes_after_the_timeout(self):
        received, code = self.end(("--drain-timeout", "0"), 1)
        self.assertEqual(code, 0)
        self.assertNotEqual(received[-1], "[DONE]")

    def test_bad_options(self):
        taken = socket.socket()
        self.addCleanup(taken.close)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flags, words in (((("--port", str(port))), "cannot listen on 127.0.0.1 port"),
                             (("--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid"),
                             (("--max-queue", "0"), "--max-queue"), (("--port", "65536"), "--port"),
                             (("--api-keys", "/no/such/file"), "--api-keys")):
            with self.assertRaises(AssertionError) as caught:
                Server(Served.root, Served.program, *flags)
            self.assertIn(words, str(caught.exception))

    def test_short_keys_are_refused(self):
        with self.assertRaises(AssertionError) as caught:
            Server(Served.root, Served.program, environment={"FOVEA_API_KEY": "short"})
        self.assertIn("an API key has 5 bytes", str(caught.exception))


if __name__ == "__main__":
    run_tests()
