# SPDX-License-Identifier: Apache-2.0
"""Fovea as an attention implementation of Hugging Face transformers.

    import fovea.transformers
    name = fovea.transformers.register()[0]
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=name)
    outputs = model.generate_batch(prompts, generation_config)

docs/transformers.md lists the supported versions and what is refused.
"""

from .register import FLASH_NAME, PLAIN_NAME, register

__all__ = ["FLASH_NAME", "PLAIN_NAME", "register"]
