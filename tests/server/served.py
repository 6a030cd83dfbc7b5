# SPDX-License-Identifier: Apache-2.0
"""Starts `fovea serve` for tests and talks to it with plain sockets."""
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

SECONDS = 60  # max time of anything on a busy machine


class Server:
    """A server over a model of testdata with a chat template of testdata."""

    def __init__(self, root, program, *flags, keys=(), environment=None, template="smollm2"):
        self.folder = tempfile.TemporaryDirectory()
        root = pathlib.Path(root).resolve()  # a link must not depend on its place
        model = pathlib.Path(self.folder.name) / "tiny"
        model.mkdir()
        for file in (root / "testdata/models/llama").iterdir():
            (model / file.name).symlink_to(file)
        (model / "chat_template.jinja").symlink_to(root / f"testdata/chat/{template}.jinja")
        arguments = [program, "serve", str(model), "--threads", "1", "--kv-memory", "64MB", *flags]
        if "--port" not in flags:
            arguments += ["--port", "0"]
        if keys:
            file = pathlib.Path(self.folder.name) / "keys"
            file.write_text("\n".join(keys) + "\n", encoding="utf-8")
            arguments += ["--api-keys", str(file)]
        self.model = str(model)
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env=os.environ | (environment or {}))
        line = self.process.stdout.readline()
        match = re.fullmatch(r"fovea: tiny is served at http://127\.0\.0\.1:(\d+)\n", line)
        if not match:
            errors = self.process.communicate()[1]
            self.folder.cleanup()
            raise AssertionError(f"unexpected first line {line!r}: {errors}")
        self.port = int(match.group(1))

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)

    def request(self, method, path, body=None, headers=None):
        """Returns the status, the headers and the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, dict((k.lower(), v) for k, v in answer.getheaders()), answer.read()
        finally:
            connection.close()

    def post(self, path, body, headers=None):
        status, _, text = self.request("POST", path, body, headers)
        if status != 200:
            raise AssertionError(f"{path}: {status} {text!r}")
        return json.loads(text)

    def raw(self, text):
        """Sends bytes and returns everything until the server closes the connection."""
        with self.connect() as connection:
            connection.sendall(text)
            received = b""
            while piece := connection.recv(65536):
                received += piece
            return received

    def stream(self, path, body, headers=None):
        """Yields the data of each event of a stream."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request("POST", path, json.dumps(body | {"stream": True}).encode(), headers or {})
            answer = connection.getresponse()
            if answer.status != 200:
                raise AssertionError(f"{answer.status} {answer.read()!r}")
            for line in answer:
                if line.strip():
                    if not line.startswith(b"data: "):
                        raise AssertionError(line)
                    yield line[6:].strip().decode()
        finally:
            connection.close()

    def metric(self, name):
        _, _, text = self.request("GET", "/metrics")
        match = re.search(rf"^{re.escape(name)} (\S+)$", text.decode(), re.MULTILINE)
        if match:
            return float(match.group(1))
        if f"# TYPE {name.partition('{')[0]} counter" in text.decode():
            return 0.0  # a counter of a label that nothing has counted yet
        raise AssertionError(f"no {name} in {text.decode()}")

    def wait_for_metric(self, name, wanted):
        """Waits for a value, or for one that a function accepts."""
        end = time.monotonic() + SECONDS
        accepts = wanted if callable(wanted) else lambda value: value == wanted
        while not accepts(value := self.metric(name)):
            if time.monotonic() > end:
                raise AssertionError(f"{name} is {value}, not {wanted}")
            time.sleep(0.01)

    def stop(self, how=signal.SIGTERM):
        """Returns the exit code and what the server printed on stderr. how: a signal, or None if it ends by itself."""
        if how is not None and self.process.poll() is None:
            self.process.send_signal(how)
        _, errors = self.process.communicate(timeout=SECONDS)
        self.folder.cleanup()
        return self.process.returncode, errors


def run_tests():
    """Runs the tests of the calling file: its arguments are the sources' folder and the command line tool."""
    root, program = sys.argv[1:3]
    Served.root, Served.program = root, program
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], module="__main__")


class Served(unittest.TestCase):
    """Tests against one server for the class."""

    root = program = None
    flags = ()
    keys = ()
    template = "smollm2"

    @classmethod
    def setUpClass(cls):
        if cls is Served:
            raise unittest.SkipTest("a base")
        cls.server = Server(cls.root, cls.program, *cls.flags, keys=cls.keys, template=cls.template)

    @classmethod
    def tearDownClass(cls):
        code, errors = cls.server.stop()
        if code != 0 or errors:
            raise AssertionError(f"exit code {code}: {errors}")
