# SPDX-License-Identifier: Apache-2.0
"""Counts of what ran in Fovea, for tests and for logs."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Calls in this process. Replays of a CUDA graph are not counted, because they do not run Python."""

    plans: int = 0
    layers: int = 0
    stores: int = 0
    """Calls that only stored keys and values."""


counters = Counters()
