# SPDX-License-Identifier: Apache-2.0
"""The parts that only SGLang 0.5.23 has."""

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds


class SharedReads:
    """A base of FoveaBackend, which says when it has read the scheduler's tables."""

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """A group of layers plans at its first layer, so tables are read until the pass ends."""
        return SharedReadEnds.POST_REPLAY


def draft_result(name: str, backend: Any) -> Any:
    """Returns a backend as the maps of DraftBackendFactory return it: with its name."""
    return name, backend
