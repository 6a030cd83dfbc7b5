# SPDX-License-Identifier: Apache-2.0
"""Choice of the adapter for a version of transformers."""

import re
from pathlib import Path
from types import ModuleType

import fovea

from . import cb_5_17, cb_5_19, cb_5_24
from .contract import Sources, differences

ADAPTERS: tuple[ModuleType, ...] = (cb_5_17, cb_5_19, cb_5_24)
"""Oldest first. Each has FIRST and LAST version, CONTRACT, PREFIXES, install() and paged_pass()."""


def parse(version: str) -> tuple[int, int]:
    """Returns major and minor of a version, "5.24.0" or "5.25.0.dev0"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise fovea.Error(f"transformers has version {version!r}, expected MAJOR.MINOR")
    return int(match[1]), int(match[2])


def label(adapter: ModuleType) -> str:
    """Returns the versions of an adapter, "5.19 to 5.23" or "5.24"."""
    first, last = (".".join(map(str, each)) for each in (adapter.FIRST, adapter.LAST))
    return first if first == last else f"{first} to {last}"


def adapter_for(version: str, package: Path) -> ModuleType:
    """Returns the adapter for the transformers package in this folder.

    Raises fovea.Error for a version without an adapter. For a newer one the message names every difference from the
    newest adapter's contract. A supported version whose source breaks the contract is an error as well.
    """
    number = parse(version)
    adapter = next((each for each in ADAPTERS if each.FIRST <= number <= each.LAST), None)
    if number < ADAPTERS[0].FIRST:
        raise fovea.Error(
            f"transformers is {version}, the oldest supported version is {label(ADAPTERS[0])}: install a newer one"
        )
    closest = adapter or max((each for each in ADAPTERS if number >= each.FIRST), key=lambda each: each.FIRST)
    changes = differences(Sources(package), closest.CONTRACT)
    if adapter is not None and not changes:
        return adapter
    found = "".join(f"\n  {each}" for each in changes) or "\n  none in what Fovea relies on"
    raise fovea.Error(
        f"transformers is {version}; Fovea supports {', '.join(map(label, ADAPTERS))}. Differences from the adapter of "
        f"{label(closest)}:{found}"
    )
