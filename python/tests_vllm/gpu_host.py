# SPDX-License-Identifier: Apache-2.0
"""The time that the host spends in the builder and in the layers of an attention backend."""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, MLAAttentionImpl


@contextmanager
def host_times() -> Iterator[dict[str, list[float]]]:
    """Yields [calls, microseconds of all] by name of each build() of a builder and each forward of a layer that runs
    meanwhile. Layers in a replayed graph do not run on the host."""
    times: dict[str, list[float]] = {}
    changed = []
    for base, names in (
        (AttentionMetadataBuilder, ("build",)),
        (AttentionImpl, ("forward",)),
        (MLAAttentionImpl, ("forward_mha", "forward_mqa")),
    ):
        for owner in _subclasses(base):
            for name in names:
                if name in vars(owner):
                    changed.append((owner, name, vars(owner)[name]))
                    setattr(owner, name, _timed(vars(owner)[name], f"{owner.__name__}.{name}", times))
    try:
        yield times
    finally:
        for owner, name, method in changed:
            setattr(owner, name, method)


def _subclasses(owner: type) -> set[type]:
    direct = set(owner.__subclasses__())
    return direct | {each for sub in direct for each in _subclasses(sub)}


def _timed(method: Any, label: str, times: dict[str, list[float]]) -> Any:
    @functools.wraps(method)
    def timed(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = method(*arguments, **options)
        entry = times.setdefault(label, [0, 0.0])
        entry[0] += 1
        entry[1] += (time.perf_counter() - begin) * 1e6
        return result

    return timed
