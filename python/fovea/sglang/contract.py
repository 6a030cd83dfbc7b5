# SPDX-License-Identifier: Apache-2.0
"""Chooses the file that fits the installed version of SGLang."""

import warnings

import sglang
from packaging.version import Version

_TESTED = (Version("0.5.17"), Version("0.5.23"))
_FIRST_WITH_STAMPS = Version("0.5.23")  # the factory of draft backends takes a backend with its name

_version = Version(sglang.__version__.split("+")[0])
if _version < _TESTED[0]:
    raise ImportError(f"SGLang is {_version}, Fovea's plug-in needs {_TESTED[0]} or newer")
if _version not in _TESTED:
    known = ", ".join(map(str, _TESTED))
    warnings.warn(f"SGLang is {_version}, Fovea's plug-in is tested with {known}", stacklevel=2)

if _version < _FIRST_WITH_STAMPS:
    from fovea.sglang.v0_5_17 import SharedReads, draft_result
else:
    from fovea.sglang.v0_5_23 import SharedReads, draft_result

__all__ = ["SharedReads", "draft_result"]
