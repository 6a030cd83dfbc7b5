#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads a server with streams of random tokens and prints when their tokens arrive, like `fovea bench engine` does for
the engine alone.

    fovea serve MODEL --max-requests 264 &
    bench/serving.py --requests 256 --input-len 1024 --output-len 256

sends all requests at once. With --prompts N the streams first run by themselves, and then N further prompts of
--prompt-len tokens are always computed at the same time, so that every step has a prompt chunk; the time between tokens
is shown for both stretches. --fields '{"structured_outputs": {"json": SCHEMA}}' adds fields to the requests; a schema
must not let an answer end before its --output-len.

Needs Python alone. Clients are divided over processes, because one would see tokens later than they arrive.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import sys
import threading
import time
import urllib.parse
import urllib.request

EVENT = b"data: {"
PROCESSES = multiprocessing.get_context("fork")
Event, Queue = PROCESSES.Event, PROCESSES.Queue


def start_process(function, *arguments):
    process = PROCESSES.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


class Stream(asyncio.Protocol):
    """One streamed completion on a connection of its own. `times` are the arrivals of its tokens."""

    def __init__(self, request, tokens):
        self.request, self.tokens = request, tokens
        self.transport = None
        self.sent, self.times, self.tail = 0.0, [], b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport
        self.sent = time.monotonic()
        transport.write(self.request)

    def data_received(self, data):
        now = time.monotonic()
        if not self.tail and not data.startswith(b"HTTP/1.1 200 "):
            self.fail(data)
            return
        text = self.tail + data
        self.times += [now] * text.count(EVENT)
        self.tail = text[-(len(EVENT) - 1) :]
        if b"[DONE]" in text:
            del self.times[self.tokens :]  # the last event may bring the end alone
            self.transport.close()

    def fail(self, data):
        if not self.done.done():
            self.done.set_exception(RuntimeError(data[:300].decode("utf-8", "replace")))
        self.transport.close()

    def connection_lost(self, error):
        if self.done.done():
            return
        if len(self.times) < self.tokens:
            self.done.set_exception(RuntimeError(f"{len(self.times)} of {self.tokens} tokens came: {error}"))
        else:
            self.done.set_result(None)


class Client:
    def __init__(self, options):
        self.options = options
        address = urllib.parse.urlsplit(options.url)
        self.host, self.port = address.hostname, address.port or 80

    def request(self, prompt_tokens, output_tokens, seed):
        """Returns the bytes of a request with random tokens."""
        pick = random.Random(seed)
        prompt = [pick.randrange(self.options.vocabulary) for _ in range(prompt_tokens)]
        body = {"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        body |= self.options.fields
        data = json.dumps(body).encode()
        head = [
            "POST /v1/completions HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            f"Content-Length: {len(data)}",
            "Content-Type: application/json",
            "Connection: close",
        ]
        return "\r\n".join([*head, "", ""]).encode() + data

    async def run(self, request, tokens):
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(lambda: Stream(request, tokens), self.host, self.port)
        await stream.done
        return stream


def run_streams(options, numbers, start, results):
    """Runs the requests with these numbers at once."""

    async def run():
        client = Client(options)
        requests = [client.request(options.input_len, options.output_len, f"{options.seed} {n}")
                    for n in numbers]
        start.wait()
        streams = await asyncio.gather(*(client.run(request, options.output_len) for request in requests))
        return [(stream.sent, stream.times) for stream in streams]

    try:
        results.put(asyncio.run(run()))
    except Exception as error:  # the parent reports it
        results.put(str(error))


def run_prompts(options, number, begin, end, results):
    """Computes one prompt after another from `begin` on, until `end` is set, and returns their number."""

    async def run():
        client = Client(options)
        count = 0
        while not end.is_set():
            count += 1
            await client.run(client.request(options.prompt_len, 1, f"prompt {number} {count}"), 1)
        return count

    begin.wait()
    try:
        results.put(asyncio.run(run()))
    except Exception as error:
        results.put(str(error))


def counters(options):
    """Returns three counters of the server: first tokens, passes of the engine, and seconds of the server's thread."""
    with urllib.request.urlopen(options.url + "/metrics", timeout=10) as answer:
        text = answer.read().decode()
    names = ("fovea_time_to_first_token_seconds_count", "fovea_engine_steps_total", "fovea_http_thread_seconds_total")
    return [float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE).group(1)) for name in names]


def percentile(values, share):
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else float("nan")


def gap_figures(streams, begin=float("-inf"), end=float("inf")):
    """Describes the times between tokens that lie in a stretch of time."""
    gaps = [b - a for _, times in streams for a, b in zip(times, times[1:]) if a >= begin and b <= end]
    p50, p99 = percentile(gaps, 0.5), percentile(gaps, 0.99)
    return {"between_tokens_p50_ms": 1e3 * p50, "between_tokens_p99_ms": 1e3 * p99, "p99_over_p50": p99 / p50}


def thread_figures(before, after, streams):
    """Describes the time that the server's thread took for the passes between two calls of counters()."""
    steps = int(after[1] - before[1])
    each = 1e6 * (after[2] - before[2]) / max(steps, 1)
    return {"steps": steps, "server_thread_us_per_step": each, "server_thread_us_per_step_and_stream": each / streams}


class Health(threading.Thread):
    """Asks for /health until it is told to stop."""

    def __init__(self, options):
        super().__init__(daemon=True)
        self.url, self.seconds, self.stopped = options.url + "/health", [], threading.Event()

    def run(self):
        while not self.stopped.wait(0.02):
            begin = time.monotonic()
            urllib.request.urlopen(self.url, timeout=60).read()
            self.seconds.append(time.monotonic() - begin)

    def figures(self):
        self.stopped.set()
        self.join()
        shares = {"health_p50_ms": 0.5, "health_p99_ms": 0.99}
        return {name: 1e3 * percentile(self.seconds, share) for name, share in shares.items()}


class Stretches:
    """Marks a stretch in which the streams run alone, and one in which prompts are computed, too."""

    def __init__(self, options):
        self.options = options
        self.begin, self.end, self.results = Event(), Event(), Queue()
        self.marks = []  # time and counters at the borders of the stretches
        self.workers = [start_process(run_prompts, options, n, self.begin, self.end, self.results)
                        for n in range(options.prompts)]

    def run(self, first_tokens):
        """Waits until every stream has its first token, then lets time pass."""
        while counters(self.options)[0] < first_tokens:
            time.sleep(0.02)
        for seconds in (self.options.settle, self.options.alone):
            time.sleep(seconds)
            self.mark()
        self.begin.set()
        for seconds in (self.options.settle, self.options.with_prompts):
            time.sleep(seconds)
            self.mark()
        self.end.set()

    def mark(self):
        self.marks.append((time.monotonic(), counters(self.options)))

    def figures(self, streams):
        prompts = sum(take(self.results) for _ in self.workers)
        if min(times[-1] for _, times in streams) < self.marks[3][0]:
            raise SystemExit("the streams ended too early: --output-len is too small for --alone and --with-prompts")
        figures = {}
        for name, (begin, end) in (("alone", self.marks[:2]), ("with_prompts", self.marks[2:])):
            stretch = gap_figures(streams, begin[0], end[0]) | thread_figures(begin[1], end[1], len(streams))
            figures |= {f"{name}_{key}": value for key, value in stretch.items()}
        return figures | {"prompts": prompts}


def take(results):
    """Returns what a process has put into the queue; its failure ends the program."""
    result = results.get(timeout=600)
    if isinstance(result, str):
        raise SystemExit(f"a request failed: {result}")
    return result


def measure(options):
    start, results = Event(), Queue()
    shares = [range(n, options.requests, options.processes) for n in range(min(options.processes, options.requests))]
    for numbers in shares:
        start_process(run_streams, options, numbers, start, results)
    stretches = Stretches(options) if options.prompts else None
    time.sleep(1 + options.requests * options.input_len * 2e-6)  # the processes make their prompts
    before = counters(options)
    health = Health(options)
    begin = time.monotonic()
    start.set()
    health.start()
    if stretches:
        stretches.run(before[0] + options.requests)
    streams = [stream for _ in shares for stream in take(results)]
    health_figures = health.figures()
    after = counters(options)
    first = [times[0] - sent for sent, times in streams]
    figures = {
        "requests": options.requests,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "first_token_p50_ms": 1e3 * percentile(first, 0.5),
        "first_token_p99_ms": 1e3 * percentile(first, 0.99),
    } | health_figures
    if stretches:
        return figures | stretches.figures(streams)
    figures |= gap_figures(streams)
    figures["prompt_tokens_per_s"] = options.requests * options.input_len / (max(t[0] for _, t in streams) - begin)
    figures["output_tokens_per_s"] = options.requests * options.output_len / (max(t[-1] for _, t in streams) - begin)
    return figures | thread_figures(before, after, options.requests)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    for name, value, what in (
        ("requests", 256, "streams"),
        ("input-len", 1024, "prompt tokens of a stream"),
        ("output-len", 256, "generated tokens of a stream"),
        ("prompts", 0, "prompts that are computed at any time while the streams run"),
        ("prompt-len", 1024, "tokens of such a prompt"),
        ("processes", 8, "processes of clients"),
        ("seed", 0, "seed of the tokens"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{what}; default {value}")
    for name, value, what in (
        ("settle", 0.5, "seconds before each stretch that are not measured"),
        ("alone", 2.0, "seconds without prompts"),
        ("with-prompts", 4.0, "seconds with prompts"),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, help=f"{what}; default {value}")
    parser.add_argument("--fields", type=json.loads, default={}, help="an object with further fields of each request")
    parser.add_argument("--output", choices=("md", "json"), default="md")
    options = parser.parse_args(arguments)
    with urllib.request.urlopen(options.url + "/tokenizer_info", timeout=10) as answer:
        options.vocabulary = json.load(answer)["vocab_size"]
    return options


def main(arguments):
    options = parse(arguments)
    figures = measure(options)
    if options.output == "json":
        print(json.dumps(figures))
        return
    print("| figure | value |\n| --- | ---: |")
    for name, value in figures.items():
        print(f"| {name} | {value:.3f} |" if isinstance(value, float) else f"| {name} | {value} |")


if __name__ == "__main__":
    main(sys.argv[1:])
