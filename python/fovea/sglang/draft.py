# SPDX-License-Identifier: Apache-2.0
"""The decode steps of a draft model."""

from typing import Any

from fovea.sglang.backend import FoveaBackend


class DraftSteps:
    """Backends of the steps in which a draft model proposes tokens, one a step. SGLang calls it as one backend, and
    each step with its own."""

    needs_cpu_seq_lens = False
    kv_index_translator = None

    def __init__(self, runner: Any, topk: int, steps: int):
        if topk > 1:
            raise NotImplementedError(
                f"speculative_eagle_topk is {topk}: Fovea's plug-in drafts chains (1). Choose another backend for the "
                "draft model by --speculative-draft-attention-backend; Fovea verifies the trees"
            )
        self.attn_backends = [FoveaBackend(runner, draft_step=step) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)
