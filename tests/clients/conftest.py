# SPDX-License-Identifier: Apache-2.0
"""A server for the tests of clients. FOVEA_CLI names the command line tool."""
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/server"))
from served import Server  # noqa: E402


@pytest.fixture(scope="session")
def server():
    started = Server(ROOT, os.environ.get("FOVEA_CLI", ROOT / "build/fovea"), keys=("a-key-for-tests",))
    yield started
    code, errors = started.stop()
    assert (code, errors) == (0, "")
