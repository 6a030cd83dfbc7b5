# SPDX-License-Identifier: Apache-2.0
"""Chooses the file that fits the installed version of vLLM."""

import warnings

import vllm
from packaging.version import Version

_TESTED = ((0, 24), (0, 32), (0, 33))
_FIRST_WITH_LAYOUTS = Version("0.29")  # a layer's cache became [blocks, heads, tokens, content] in every backend

_version = Version(vllm.__version__.split("+")[0])
if _version < Version("0.24"):
    raise ImportError(f"vLLM is {_version}, Fovea's plug-in needs 0.24 or newer")
if _version.release[:2] not in _TESTED:
    known = ", ".join(f"{major}.{minor}" for major, minor in _TESTED)
    warnings.warn(f"vLLM is {_version}, Fovea's plug-in is tested with {known}", stacklevel=2)

if _version < _FIRST_WITH_LAYOUTS:
    from fovea.vllm.v0_24 import MhaCache, MlaCache, rank_merger
else:
    from fovea.vllm.v0_33 import MhaCache, MlaCache, rank_merger

__all__ = ["MhaCache", "MlaCache", "rank_merger"]
