# SPDX-License-Identifier: Apache-2.0
"""Layers of vLLM that share one Fovea backend."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import fovea
from fovea.torch import device_name
from fovea.torch.lasting import thread_pool
from fovea.vllm.counters import counters
from fovea.vllm.specs import wish

if TYPE_CHECKING:
    from fovea.vllm.metadata import Metadata

# Workspaces without a group. Layers of one spec take one when they are made, so that vLLM counts it before it gives the
# rest of the memory to the cache. Groups return theirs: vLLM makes and drops some while it profiles.
_free_workspaces: dict[tuple[fovea.AttentionSpec, torch.device], list[torch.Tensor]] = {}


def select(
    spec: fovea.AttentionSpec, cache: fovea.KvCacheSpec | None, limits: fovea.BatchLimits, device: torch.device
) -> fovea.Selection:
    """Selects the backend of a group. Raises fovea.Error "unsupported" with every reason if there is none."""
    name = device_name(device)
    return fovea.select(spec, cache, limits=limits, device=name, threads=_threads(name), backend=wish())


def _threads(device: str) -> fovea.ThreadPool | None:
    """Returns as many threads as torch has now: vLLM chooses their number on a CPU."""
    return thread_pool() if device == "cpu" else None


def take_workspace(
    spec: fovea.AttentionSpec, cache: fovea.KvCacheSpec | None, limits: fovea.BatchLimits, device: torch.device
) -> None:
    """Takes the workspace of the group that a new layer will be in. Raises fovea.Error if no backend serves it."""
    needed = select(spec, cache, limits, device).workspace_bytes
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
    ):
        """caches: of every layer, in the form that fovea.KvPool.lend() takes. Scopes without a cache have none."""
        self.spec = spec
        self.page_size = 0 if cache is None else cache.page_size
        selection = select(spec, cache, limits, device)
        pool = None if cache is None else fovea.KvPool.lend(cache, caches, device_name(device))
        self.backend = selection.create(pool)
        self.description = selection.explain().splitlines()[0]
        needed = self.backend.workspace_bytes(limits)
        free = _free_workspaces.setdefault((spec, device), [])
        workspace = free.pop() if free else None
        if workspace is None or workspace.nbytes < needed:
            workspace = torch.empty(max(needed, 1), dtype=torch.uint8, device=device)
        self.backend.reserve(limits, workspace)
        weakref.finalize(self, free.append, workspace).atexit = False
        self._planned: Metadata | None = None
        self._done: set[int] = set()

    def forward(self, metadata: "Metadata", index: int, **tensors: Any) -> None:
        """Runs layer `index` of the pass; tensors are arguments of fovea.Backend.forward()."""
        # A layer that runs twice with one metadata is in the next pass: drafters change lengths in place.
        if self._planned is not metadata or index in self._done:
            self.backend.plan(metadata.batch(self))
            self._planned = metadata
            self._done.clear()
            counters.plans += 1
        self._done.add(index)
        self.backend.forward(index, **tensors)
        counters.layers += 1
