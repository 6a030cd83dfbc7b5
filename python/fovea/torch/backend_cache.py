# SPDX-License-Identifier: Apache-2.0
"""Backends over caches that torch tensors hold, created when they are first needed and used again afterwards."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fovea
from fovea.torch.dtypes import device_name, indexed_device
from fovea.torch.lasting import allocate, current_stream

Layer = Sequence[torch.Tensor]
"""The cache of one layer, in the form that fovea.KvPool.lend() takes: (k, v), (k, v, k_scale, v_scale) or (rows,)."""

_LIMITS = ("max_requests", "max_tokens", "max_q_len", "max_kv_len", "max_encoder_len")
_MAX_INT32 = 2**31 - 1
_SMALLEST = fovea.BatchLimits()
_IDLE = fovea.Batch(mode="idle")


class _Entry:
    """A backend, the limits and the workspace that it has reserved, and weak references to the caches it reads."""

    __slots__ = ("backend", "captured", "limits", "storages", "workspace")

    def __init__(self, backend: fovea.Backend, storages: list[StorageWeakRef]):
        self.backend = backend
        self.storages = storages
        self.limits = _SMALLEST
        self.workspace: torch.Tensor | None = None
        self.captured = False

    def serves(self, needed: fovea.BatchLimits) -> bool:
        have = self.limits
        return self.workspace is not None and (
            needed.max_requests <= have.max_requests
            and needed.max_tokens <= have.max_tokens
            and needed.max_q_len <= have.max_q_len
            and needed.max_kv_len <= have.max_kv_len
            and needed.max_encoder_len <= have.max_encoder_len
        )

    def is_dead(self) -> bool:
        """Returns True if memory of a cache tensor was freed."""
        return any(storage.expired() for storage in self.storages)


class BackendCache:
    """A cache of backends, one for each combination of spec, cache layout, cache tensors, device and stream.

    The least recently used backend is dropped beyond `capacity`. Backends of one device and stream share one
    workspace, so every pass must be planned anew before it runs: call plan() and forward() of one backend before those
    of another. backend_for() with own_workspace=True returns a backend whose plan outlives the passes of others.

    Limits of backends grow by powers of two, as batches need them. A CUDA graph holds addresses of the workspace. So a
    backend that backend_for() returned during a capture stays as it is until clear(), and a capture cannot grow
    limits: warm up with the largest batch before it, on any stream of the device. Replays share the workspace with the
    stream that warmed up, so neither may run while the other does.

    The cache keeps no cache tensor alive. A backend is dropped after the memory of its tensors was freed.

    All methods may be called from several threads. A thread that plans a backend and runs it holds `lock` meanwhile.
    """

    def __init__(self, capacity: int = 2048, *, backend: str = "auto", threads: fovea.ThreadPool | int | None = None):
        """backend: the wish given to fovea.select(). threads: of the CPU; None is the pool that all backends share."""
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, must be at least 1")
        self.capacity = capacity
        self.lock = threading.RLock()
        self._wish = backend
        self._threads = threads
        self._entries: OrderedDict[tuple[Any, ...], _Entry] = OrderedDict()
        self._captured: list[_Entry] = []
        self._workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Drops every backend and workspace. CUDA graphs that used them must not be replayed afterwards."""
        with self.lock:
            self._entries.clear()
            self._captured.clear()
            self._workspaces.clear()

    def backend_for(
        self,
        spec: fovea.AttentionSpec,
        cache: fovea.KvCacheSpec | None = None,
        layers: Sequence[Layer] = (),
        limits: fovea.BatchLimits | None = None,
        *,
        device: torch.device | str = "cpu",
        own_workspace: bool = False,
    ) -> fovea.Backend:
        """Returns a backend for the current stream that accepts batches within `limits`.

        layers: the cache tensors of every layer of the group, as fovea.KvPool.lend() takes them. The scopes ragged and
        encoder have none and name their `device`. The reserved limits may exceed `limits`, so give a Batch its
        max_q_len and max_kv_len.
        """
        place = layers[0][0].device if layers else indexed_device(torch.device(device))
        needed = limits or _SMALLEST
        stream, capturing = current_stream(place)
        options = (needed.prefix_levels, needed.min_prefix_savings, needed.workspace_budget)
        key = (spec, cache, _layer_key(layers), place, options, own_workspace)
        with self.lock:
            entry = self._find(key, stream, capturing, needed)
            if entry is not None and entry.serves(needed):
                if capturing:
                    self._keep(entry)
                elif not (own_workspace or entry.captured):
                    self._share_workspace(entry, place, stream)
                return entry.backend
            if capturing:
                raise _not_warmed_up(needed, entry)
            grown = _grown(needed, entry)
            if entry is None or entry.captured:
                entry = self._create(spec, cache, layers, grown, place)
                self._insert((*key, stream), entry)
            self._reserve(entry, grown, place, stream, own_workspace)
            return entry.backend

    def run(
        self,
        spec: fovea.AttentionSpec,
        cache: fovea.KvCacheSpec | None,
        layers: Sequence[Layer],
        limits: fovea.BatchLimits,
        batch: fovea.Batch,
        *,
        device: torch.device | str = "cpu",
        layer: int = 0,
        **tensors: Any,
    ) -> None:
        """Plans a batch and runs one layer of it; `tensors` are the arguments of fovea.Backend.forward()."""
        with self.lock:
            backend = self.backend_for(spec, cache, layers, limits, device=device)
            backend.plan(batch)
            backend.forward(layer, **tensors)
            backend.plan(_IDLE)  # drops the references to the batch's arrays

    def _find(self, key: tuple[Any, ...], stream: int, capturing: bool, needed: fovea.BatchLimits) -> _Entry | None:
        found = self._entries.get((*key, stream))
        if found is not None:
            self._entries.move_to_end((*key, stream))
        if not capturing or (found is not None and found.serves(needed)):
            return found
        # A capture runs on a stream of its own and takes a backend of the stream that warmed up.
        for known, other in reversed(self._entries.items()):
            if known[:-1] == key and (found is None or other.serves(needed)):
                found = other
                if other.serves(needed):
                    self._entries[(*key, stream)] = other
                    break
        return found

    def _keep(self, entry: _Entry) -> None:
        if not entry.captured:
            entry.captured = True
            self._captured.append(entry)

    def _create(
        self,
        spec: fovea.AttentionSpec,
        cache: fovea.KvCacheSpec | None,
        layers: Sequence[Layer],
        limits: fovea.BatchLimits,
        device: torch.device,
    ) -> _Entry:
        name = device_name(device)
        selection = fovea.select(spec, cache, limits=limits, device=name, threads=self._threads, backend=self._wish)
        pool = fovea.KvPool.lend(cache, layers, name, keep=False) if layers else None
        storages = [StorageWeakRef(tensor.untyped_storage()) for layer in layers for tensor in layer]
        return _Entry(selection.create(pool), storages)

    def _insert(self, key: tuple[Any, ...], entry: _Entry) -> None:
        for known in [known for known, other in self._entries.items() if other.is_dead()]:
            del self._entries[known]
        self._entries[key] = entry
        self._entries.move_to_end(key)
        while len(self._entries) > self.capacity:
            self._entries.popitem(last=False)

    def _reserve(
        self, entry: _Entry, limits: fovea.BatchLimits, device: torch.device, stream: int, own_workspace: bool
    ) -> None:
        needed = entry.backend.workspace_bytes(limits)
        if own_workspace:
            workspace = _workspace(needed, device)
        else:
            workspace = self._workspaces.get((device, stream))
            if workspace is None or workspace.nbytes < needed:
                workspace = _workspace(needed, device)
                self._workspaces[(device, stream)] = workspace
        entry.backend.reserve(limits, workspace)
        entry.limits, entry.workspace = limits, workspace

    def _share_workspace(self, entry: _Entry, device: torch.device, stream: int) -> None:
        """Moves a backend to the workspace of its stream after that was replaced by a larger one."""
        workspace = self._workspaces.get((device, stream))
        if workspace is not None and entry.workspace is not workspace:
            entry.backend.reserve(entry.limits, workspace)
            entry.workspace = workspace


def _layer_key(layers: Sequence[Layer]) -> tuple[Any, ...]:
    return tuple([tuple([(t.data_ptr(), t.shape, t.stride()) for t in layer]) for layer in layers])


def _workspace(needed: int, device: torch.device) -> torch.Tensor:
    return allocate(lambda: torch.empty(max(needed, 1), dtype=torch.uint8, device=device), device)


def _grown(needed: fovea.BatchLimits, entry: _Entry | None) -> fovea.BatchLimits:
    """Returns limits that serve `needed` and whatever the entry served, each a power of two."""
    fields = {}
    for name in _LIMITS:
        value = getattr(needed, name)
        power = min(1 << (value - 1).bit_length(), _MAX_INT32) if value > 0 else value
        fields[name] = power if entry is None else max(power, getattr(entry.limits, name))
    return needed.replace(**fields)


def _not_warmed_up(needed: fovea.BatchLimits, entry: _Entry | None) -> fovea.Error:
    if entry is None:
        text = "no backend for these layers was used before the capture: run the pass once before it is captured"
    else:
        name = next(name for name in _LIMITS if getattr(needed, name) > getattr(entry.limits, name))
        text = (
            f"limits.{name} is {getattr(needed, name)}, {getattr(entry.limits, name)} is reserved and a capture cannot "
            f"reserve more: run a pass with a {name} of {getattr(needed, name)} before the capture"
        )
    error = fovea.Error(text)
    error.code = "invalid_argument"
    return error


default_cache = BackendCache()
backend_for = default_cache.backend_for
