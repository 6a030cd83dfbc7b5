# SPDX-License-Identifier: Apache-2.0
"""Fovea as an attention backend of vLLM.

`pip install fovea` is enough: vLLM finds register() by the entry point group `vllm.general_plugins` and calls it in
every process. Then `vllm serve MODEL --attention-backend CUSTOM` runs attention in Fovea. The environment variable
FOVEA_VLLM_OVERRIDE names backends of vLLM that Fovea replaces, separated by commas: "FLASH_ATTN,FLASHMLA".

    from fovea.vllm import counters

    print(counters.layers)  # attention layers that ran in Fovea in this process

docs/vllm.md lists versions, settings and every case that is refused.
"""

from fovea.serving.counters import Counters, counters
from fovea.vllm.plugin import register

__all__ = ["Counters", "counters", "register"]
