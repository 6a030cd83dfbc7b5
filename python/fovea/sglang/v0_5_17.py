# SPDX-License-Identifier: Apache-2.0
"""The parts that only SGLang 0.5.17 has."""

from typing import Any


class SharedReads:
    """A base of FoveaBackend. This version does not ask when a backend has read the scheduler's tables."""


def draft_result(name: str, backend: Any) -> Any:
    """Returns a backend as the maps of DraftBackendFactory return it."""
    return backend
