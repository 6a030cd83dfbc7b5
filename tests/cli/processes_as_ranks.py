#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""processes_as_ranks.py FOVEA MODEL [MPIEXEC]: runs commands over four processes, which mpiexec starts or which meet by a
file, and expects what one process gives. Then ranks are lost: requests must get an error in time."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

FOVEA, MODEL = sys.argv[1:3]
MPIEXEC = sys.argv[3] if len(sys.argv) > 3 else None
RANKS = 4
PROMPT = "And it came to pass"
# The timeout of ranks is 10 s, and the engine tries a pass twice.
MAX_SECONDS = 30


class Processes:
    """The ranks of one command. Rank 0 has the output."""

    def __init__(self, folder, *arguments):
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=folder))
        command = [FOVEA, *arguments, "--tp", str(RANKS)]
        if MPIEXEC:
            # Each process leaves its id. mpiexec would end all when one that it started dies of a signal, and sends
            # SIGUSR1 when one fails, so it starts shells.
            note = f'trap "" USR1; "$0" "$@" & echo $! > {self.folder}/$PMI_RANK; wait $!'
            self.started = [self.start([MPIEXEC, "-disable-auto-cleanup", "-n", str(RANKS), "sh", "-c", note, *command])]
        else:
            meet = ["--rendezvous", str(self.folder / "file"), "--rendezvous-timeout", "60"]
            self.started = [self.start([*command, *meet, "--rank", str(rank)]) for rank in range(RANKS)]

    @staticmethod
    def start(command):
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def pid(self, rank):
        return int((self.folder / str(rank)).read_text()) if MPIEXEC else self.started[rank].pid

    def wait(self):
        """Returns the output of rank 0, and expects none of the others."""
        results = [process.communicate(timeout=300) for process in self.started]
        for rank, (process, (out, err)) in enumerate(zip(self.started, results)):
            assert process.returncode == 0, f"rank {rank}: exit code {process.returncode}: {err}"
            assert rank == 0 or out == "", f"rank {rank} has printed {out}"
        return results[0][0]

    def end(self):
        for rank in range(RANKS):
            try:
                os.kill(self.pid(rank), signal.SIGKILL)
            except ProcessLookupError:
                pass
        for process in self.started:
            process.communicate(timeout=60)


def run_one(*arguments):
    return subprocess.run([FOVEA, *arguments], check=True, capture_output=True, text=True).stdout


def check_commands(folder):
    generate = ["generate", MODEL, "--prompt", PROMPT, "--prompt", "In the beginning", "-n", "40", "--json"]
    texts = [json.loads(line)["text"] for line in run_one(*generate).splitlines()]
    for more in [], ["--dcp", str(RANKS)], ["--speculate", "ngram"]:
        lines = Processes(folder, *generate, *more).wait().splitlines()
        assert [json.loads(line)["text"] for line in lines] == texts, (more, lines)
    experts = ["generate", MODEL.replace("llama", "gpt_oss"), "--prompt", PROMPT, "-n", "40"]
    assert Processes(folder, *experts, "--expert-parallel").wait() == run_one(*experts)
    # Several engines, one after another; the last one is refused by all ranks.
    rows = json.loads(Processes(folder, "check", MODEL, "--no-perplexity", "--backends", "cpu,reference,flash",
                                "--kv-dtypes", "fp32", "--json").wait())
    assert [row.get("pass") for row in rows] == [True, True, None], rows
    figures = json.loads(Processes(folder, "bench", "engine", MODEL, "--requests", "4", "--input-len", "20",
                                   "--output-len", "10", "--rate", "100", "-o", "json").wait())
    assert figures["ranks"] == RANKS, figures
    return texts[0]


def ask(port, answers):
    """Appends the text of an answer, or the status of an error."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 40, "temperature": 0}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answers.append(json.load(answer)["choices"][0]["text"])
    except urllib.error.HTTPError as error:
        answers.append(error.code)


def check_server(folder, text, lose):
    """Serves requests, then loses rank 1 by the signal and expects errors."""
    ranks = Processes(folder, "serve", MODEL, "--port", "0")
    try:
        line = ranks.started[0].stdout.readline()
        port = int(line.rsplit(":", 1)[1])
        answers = []
        asks = [threading.Thread(target=ask, args=(port, answers)) for _ in range(3)]
        for thread in asks:
            thread.start()
        for thread in asks:
            thread.join()
        assert answers == [text] * 3, answers
        time.sleep(3)  # ranks wait for longer than one heartbeat
        os.kill(ranks.pid(1), lose)
        begin, answers = time.monotonic(), []
        ask(port, answers)
        ask(port, answers)
        seconds = time.monotonic() - begin
        assert all(isinstance(answer, int) and answer >= 500 for answer in answers), answers
        assert seconds < MAX_SECONDS, seconds
    finally:
        ranks.end()


def main():
    with tempfile.TemporaryDirectory() as folder:
        text = check_commands(folder)
        check_server(folder, text, signal.SIGKILL)
        check_server(folder, text, signal.SIGSTOP)
    print("all ranks agree")


if __name__ == "__main__":
    main()
