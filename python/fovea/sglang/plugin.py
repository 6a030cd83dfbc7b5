# SPDX-License-Identifier: Apache-2.0
"""The entry point of SGLang's plug-in group `sglang.srt.plugins`.

SGLang calls it in every process before it reads its arguments, so this module does not import Fovea's compiled part: a
backend is imported when SGLang makes one.
"""

import os
from typing import Any

NAME = "fovea"
OVERRIDE_VARIABLE = "FOVEA_SGLANG_OVERRIDE"

_REPLACEABLE = ("fa3", "fa4", "flashinfer", "flashmla", "intel_amx", "torch_native", "triton")


def register() -> None:
    """Registers Fovea under its name, and under the names of backends that FOVEA_SGLANG_OVERRIDE lists."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME not in ATTENTION_BACKENDS:
        server_args.add_attention_backend_choices([NAME])
        server_args.add_deterministic_attention_backend_choices([NAME])
        server_args.add_radix_supported_deterministic_attention_backend_choices([NAME])
        if hasattr(server_args, "add_draft_attention_backend_choices"):  # SGLang 0.5.23
            server_args.add_draft_attention_backend_choices([NAME])
        HookRegistry.register(
            "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", _offer_drafts, HookType.AROUND
        )
    for name in (NAME, *overridden()):
        ATTENTION_BACKENDS[name] = create


def overridden() -> list[str]:
    """Returns the backends that FOVEA_SGLANG_OVERRIDE names. Raises ValueError for a name that cannot be replaced."""
    names = [name.strip() for name in os.environ.get(OVERRIDE_VARIABLE, "").split(",") if name.strip()]
    for name in names:
        if name not in _REPLACEABLE:
            raise ValueError(f'{OVERRIDE_VARIABLE} names "{name}", Fovea can replace {", ".join(_REPLACEABLE)}')
    return names


def create(runner: Any) -> Any:
    """Makes the backend of a model runner. Raises NotImplementedError with every reason if Fovea does not serve it."""
    from fovea.sglang.backend import FoveaBackend

    return FoveaBackend(runner)


def _offer_drafts(
    original: Any, factory: Any, backend_name: str, backend_map: dict[str, Any], *further: Any, **options: Any
) -> Any:
    """Adds Fovea to the closed map of backends of draft models. SGLang has one map for the steps of a draft and one for
    the pass that catches up with accepted tokens."""
    from fovea.sglang.contract import draft_result

    steps = "decode" in backend_map["triton"].__name__

    def make() -> Any:
        runner = factory.draft_model_runner
        if not steps:
            return draft_result(NAME, create(runner))
        from fovea.sglang.draft import DraftSteps

        return draft_result(NAME, DraftSteps(runner, factory.topk, factory.speculative_num_steps))

    offered = backend_map | {name: make for name in (NAME, *overridden())}
    return original(factory, backend_name, offered, *further, **options)
