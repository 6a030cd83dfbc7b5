# SPDX-License-Identifier: Apache-2.0
"""The command vllm with Fovea: its benchmarks run from end to end, in processes of their own."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import model_folder
from fovea.vllm.plugin import OVERRIDE_VARIABLE

_COMMAND = [sys.executable, str(Path(__file__).with_name("command_line.py"))]
_ENVIRONMENT = os.environ | {OVERRIDE_VARIABLE: "CPU_ATTN", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1"}
_ENGINE = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
_SERVED = "Fovea: 4 layers"
_SECONDS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder("llama", tmp_path_factory.mktemp("models"))


def test_bench_throughput(folder):
    random = ["--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "8"]
    text = _run("bench", "throughput", "--model", str(folder), *_ENGINE, *random)
    assert _SERVED in text
    assert "Total num output tokens:  128" in text


def test_bench_serve(folder, tmp_path):
    log = tmp_path / "server.log"
    with _server(folder, log) as url:
        model = ["--base-url", url, "--model", "llama", "--tokenizer", str(folder), "--dataset-name", "random"]
        random = ["--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "8", "--ignore-eos"]
        text = _run("bench", "serve", *model, *random)
    fields = {line.split(":")[0]: line.split(":")[1].strip() for line in text.splitlines() if line.count(":") == 1}
    assert fields["Successful requests"] == "8"
    assert fields["Total generated tokens"] == "128"
    assert _SERVED in log.read_text()


def _run(*arguments: str) -> str:
    command = [*_COMMAND, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=_ENVIRONMENT, timeout=_SECONDS, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


@contextlib.contextmanager
def _server(folder: Path, log: Path) -> Iterator[str]:
    """Serves a model, and yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "llama"]
    with log.open("w") as output:
        command = [*_COMMAND, "serve", str(folder), *_ENGINE, *place]
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_ENVIRONMENT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url, server, log)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _wait_until_healthy(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health") as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])
