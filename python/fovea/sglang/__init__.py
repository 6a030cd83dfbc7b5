# SPDX-License-Identifier: Apache-2.0
"""Fovea as an attention backend of SGLang.

`pip install fovea` is enough: SGLang finds register() by the entry point group `sglang.srt.plugins` and calls it in
every process. Then `--attention-backend fovea` runs attention in Fovea. The environment variable
FOVEA_SGLANG_OVERRIDE names backends of SGLang that Fovea replaces, separated by commas: "fa3,triton".

    from fovea.sglang import counters

    print(counters.layers)  # attention layers that ran in Fovea in this process

docs/sglang.md lists versions, settings and every case that is refused.
"""

from fovea.serving.counters import Counters, counters
from fovea.sglang.plugin import register

__all__ = ["Counters", "counters", "register"]
