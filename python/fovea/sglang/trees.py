# SPDX-License-Identifier: Apache-2.0
"""The masks of trees of drafts."""

from typing import Any

import torch
from sglang.srt.runtime_context import get_spec

_MAX_DRAFTS = 64  # bits of a mask


def drafts_are_trees() -> bool:
    """Returns True if a draft may have siblings. Raises NotImplementedError for trees that are too large."""
    spec = get_spec()
    if spec.speculative_algorithm is None or (spec.speculative_eagle_topk or 1) == 1:
        return False
    if spec.speculative_num_draft_tokens > _MAX_DRAFTS:
        raise NotImplementedError(
            f"speculative_num_draft_tokens is {spec.speculative_num_draft_tokens}, Fovea has trees of {_MAX_DRAFTS}"
        )
    return True


def read(spec_info: Any, seq_lens: torch.Tensor, ancestors: torch.Tensor) -> None:
    """Writes the mask of a pass to `ancestors` [tokens]: bit j of a draft lets it see draft j. SGLang's mask has a row
    of bools for each draft, over all keys or over the drafts only."""
    drafts, requests = spec_info.draft_token_num, seq_lens.shape[0]
    mask = spec_info.custom_mask
    columns = torch.arange(drafts, device=mask.device)
    if mask.numel() == requests * drafts * drafts:
        visible = mask.view(requests, drafts, drafts)
    else:
        widths = seq_lens.to(torch.int64) + drafts
        starts = (torch.cumsum(widths, dim=0) - widths) * drafts
        rows = starts[:, None] + columns * widths[:, None]
        cells = rows[:, :, None] + seq_lens[:, None, None] + columns
        # Requests that pad a captured pass have no cells; what they see does not matter.
        visible = mask[cells.clamp(max=mask.numel() - 1)]
    bits = (visible.to(torch.int64) << columns).sum(dim=2)
    ancestors[: requests * drafts].copy_(bits.view(-1))
