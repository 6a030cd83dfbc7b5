# SPDX-License-Identifier: Apache-2.0
"""Layers of a serving engine that share one Fovea backend."""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

import fovea
from fovea.serving.counters import counters
from fovea.torch import device_name
from fovea.torch.lasting import thread_pool

# Workspaces without a group. An engine that sizes its caches by the memory that is left takes one when it makes a
# layer. Groups return theirs: engines make and drop some while they profile.
_free_workspaces: dict[tuple[fovea.AttentionSpec, torch.device], list[torch.Tensor]] = {}


class Pass(Protocol):
    """One forward pass of an engine. A group plans it anew when it sees another object."""

    def batch(self, group: "LayerGroup") -> fovea.Batch:
        """Returns the pass as the group's backend takes it."""


def select(
    spec: fovea.AttentionSpec,
    cache: fovea.KvCacheSpec | None,
    limits: fovea.BatchLimits,
    device: torch.device,
    wish: str,
) -> fovea.Selection:
    """Selects the backend of a group. Raises fovea.Error "unsupported" with every reason if there is none."""
    name = device_name(device)
    return fovea.select(spec, cache, limits=limits, device=name, threads=_threads(name), backend=wish)


def _threads(device: str) -> fovea.ThreadPool | None:
    """Returns as many threads as torch has now: engines choose their number on a CPU."""
    return thread_pool() if device == "cpu" else None


def take_workspace(
    spec: fovea.AttentionSpec,
    cache: fovea.KvCacheSpec | None,
    limits: fovea.BatchLimits,
    device: torch.device,
    wish: str,
) -> None:
    """Takes the workspace of the group that a new layer will be in. Raises fovea.Error if no backend serves it."""
    needed = select(spec, cache, limits, device, wish).workspace_bytes
    if (spec, device) not in _free_workspaces:
        _free_workspaces[(spec, device)] = [torch.empty(max(needed, 1), dtype=torch.uint8, device=device)]


class LayerGroup:
    """A backend over the caches of layers with equal specs.

    The layers of a group run in their order, once a pass. The first one plans the pass: on a GPU this enqueues a
    kernel, so a captured graph plans anew at every replay, from the lengths that are on the device then.
    """

    def __init__(
        self,
        spec: fovea.AttentionSpec,
        cache: fovea.KvCacheSpec | None,
        caches: Sequence[tuple[torch.Tensor, ...]],
        limits: fovea.BatchLimits,
        device: torch.device,
        *,
        wish: str,
        reserves_page_zero: bool = False,
    ):
        """caches: of every layer, in the form that fovea.KvPool.lend() takes. Scopes without a cache have none. wish:
        of fovea.select(). reserves_page_zero: only padding uses page 0."""
        self.spec = spec
        self.page_size = 0 if cache is None else cache.page_size
        selection = select(spec, cache, limits, device, wish)
        pool = None
        if cache is not None:
            name = device_name(device)
            pool = fovea.KvPool.lend(cache, caches, name, reserves_page_zero=reserves_page_zero)
        self.backend = selection.create(pool)
        self.description = selection.explain().splitlines()[0]
        needed = self.backend.workspace_bytes(limits)
        free = _free_workspaces.setdefault((spec, device), [])
        workspace = free.pop() if free else None
        if workspace is None or workspace.nbytes < needed:
            workspace = torch.empty(max(needed, 1), dtype=torch.uint8, device=device)
        self.backend.reserve(limits, workspace)
        weakref.finalize(self, free.append, workspace).atexit = False
        self._planned: Pass | None = None
        self._done: set[int] = set()

    def forward(self, current: Pass, index: int, **tensors: Any) -> None:
        """Runs layer `index` of the pass; tensors are arguments of fovea.Backend.forward()."""
        # A layer that runs twice with one object is in the next pass: drafters change lengths in place.
        if self._planned is not current or index in self._done:
            self.backend.plan(current.batch(self))
            self._planned = current
            self._done.clear()
            counters.plans += 1
        self._done.add(index)
        self.backend.forward(index, **tensors)
        counters.layers += 1
