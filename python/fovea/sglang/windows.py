# SPDX-License-Identifier: Apache-2.0
"""The slots of window layers, whose pool SGLang keeps apart from that of the other layers."""

from typing import Any

import torch

from fovea.torch import consecutive


class WindowTable:
    """A table of the slots inside the windows of a pass, at one address, as captured graphs need it."""

    def __init__(self, pool: Any, max_requests: int, max_kv_len: int, device: torch.device):
        """pool: the SWAKVPool. Entries before a window stay what they are: no kernel reads them."""
        self._pool = pool
        self._table = torch.zeros(max_requests + 1, max_kv_len, dtype=torch.int32, device=device)

    def translate(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the slots of the window pool for slots of the full pool."""
        return self._pool.translate_loc_from_full_to_swa(slots)

    def fill(
        self, full: torch.Tensor, rows: torch.Tensor, kv_lens: torch.Tensor, span: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the last `span` tokens of each request, from the start of their page on. Returns the table, and the
        row of each request. full, rows: the table of the full pool, whose row 0 is that of padding, as here."""
        requests, width = rows.shape[0], full.shape[1]
        page = self._pool.page_size
        first = (kv_lens.to(torch.int64) - span).clamp(min=0) // page * page
        count = min(span + page, width)
        columns = (first[:, None] + torch.arange(count, device=full.device)).clamp(max=width - 1)
        slots = self.translate(full[rows.to(torch.int64)[:, None], columns])
        self._table[1 : requests + 1].scatter_(1, columns, slots.to(torch.int32))
        return self._table, torch.where(rows == 0, 0, consecutive(requests + 1, full.device)[1:])
