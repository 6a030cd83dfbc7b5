# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the command line tool as rows."""

import os
import sys

from fovea._error import Error


def bench(what: str = "attention", *arguments: str, **options: object) -> list[dict[str, object]]:
    """Runs `fovea bench WHAT` in a process of its own and returns its rows.

    A row is a case, or for an engine the run: the fields that docs/json_output.md describes, those of the machine
    included.

    what: "attention" or "engine"; `arguments` follow it (engine: the model). `options` are the flags of the command
    line tool with underscores: bench(device="cuda", filter="decode", backend="flash") adds `--device cuda --filter
    decode --backend flash`. True gives the flag alone, False and None omit it. Progress goes to stderr.
    """
    import json  # not above: they would take half of the time that `import fovea` takes
    import subprocess

    command = [sys.executable, "-m", "fovea", "bench", what, *arguments, "--output", "json"]
    for name, value in options.items():
        if value is None or value is False:
            continue
        command.append("--" + name.replace("_", "-"))
        if value is not True:
            command.append(str(value))
    # The child must find the package where this process found it.
    parents = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in parents if path))
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode != 0:
        raise Error(run.stderr.strip(), "invalid_argument" if run.returncode == 2 else "device_failure")
    sys.stderr.write(run.stderr)
    parsed = json.loads(run.stdout)
    reports = parsed if isinstance(parsed, list) else [parsed]  # a list: several states of the caches
    return [{**report, **row} for report in reports for row in report.pop("results", [{}])]
