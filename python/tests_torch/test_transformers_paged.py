# SPDX-License-Identifier: Apache-2.0
"""Passes over a paged cache as transformers describes them, with padding and block tables, against torch in fp64."""

import pytest
import torch

pytest.importorskip("transformers")

from fovea.transformers.paged import CacheView, LayerGroup, PagedCache, PassArguments  # noqa: E402
from torch_reference import attend  # noqa: E402

PAGE, HEADS, KV_HEADS, DIM = 8, 4, 2, 64
LAYERS = 2
BLOCKS = 24


class Requests:
    """A cache in which the pages of two layers lie next to each other, as in 5.19, and requests with random pages."""

    def __init__(self, past: list[int], new: list[int], window: int = 0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.past, self.new, self.window = past, new, window
        self.memory = torch.randn((BLOCKS, LAYERS, 2, PAGE, KV_HEADS, DIM), generator=generator)
        self.rows_per_page = LAYERS * 2 * PAGE
        self.group = LayerGroup(0, tuple(range(LAYERS)), window, PAGE, self.rows_per_page)
        flat = self.memory.view(-1, KV_HEADS, DIM)
        self.cache = PagedCache(
            CacheView(
                (self.group,),
                pages=lambda layer: (self.memory[:, layer, 0], self.memory[:, layer, 1]),
                rows=lambda layer: (flat[2 * layer * PAGE :], flat[(2 * layer + 1) * PAGE :]),
            )
        )
        free = (torch.randperm(BLOCKS - 2, generator=generator) + 2).tolist()
        self.blocks = [
            [free.pop() for _ in range(-(-self._kept(p + n) // PAGE))] for p, n in zip(past, new, strict=True)
        ]
        tokens = sum(new)
        self.q = torch.randn((1, HEADS, tokens, DIM), generator=generator)
        self.k = torch.randn((1, KV_HEADS, tokens, DIM), generator=generator)
        self.v = torch.randn((1, KV_HEADS, tokens, DIM), generator=generator)

    def _kept(self, tokens: int) -> int:
        return min(tokens, self.window) if self.window else tokens

    def row(self, request: int, token: int) -> int:
        """Returns the row of a token, in the ring of a window if there is one."""
        place = token % self.window if self.window else token
        return self.blocks[request][place // PAGE] * self.rows_per_page + place % PAGE

    def arguments(self, *, padding: int, block_table: bool = False) -> PassArguments:
        """Returns the arguments of the pass, with `padding` tokens and as many requests of length 0 at the end."""
        read, write, lens = [], [], []
        for request, (past, new) in enumerate(zip(self.past, self.new, strict=True)):
            first = max(0, past - self.window + 1) if self.window else 0
            read += [self.row(request, token) for token in range(first, past)]
            read += [1] * new if self.window else [self.row(request, past + i) for i in range(new)]
            trash = max(0, new - self.window) if self.window else 0
            write += [self.rows_per_page] * trash + [self.row(request, past + i) for i in range(trash, new)]
            lens.append(past - first + new)
        offsets = [torch.tensor([0, *each]).cumsum(0, dtype=torch.int32) for each in (self.new, lens)]
        cu_q, cu_k = (torch.cat([each, each[-1:].expand(padding)]) for each in offsets)
        table = None
        if block_table:
            width = max(map(len, self.blocks)) + 1
            table = torch.full((len(lens) + padding, width), -1, dtype=torch.int32)
            for request, blocks in enumerate(self.blocks):
                table[request, : len(blocks)] = torch.tensor(blocks) * (self.rows_per_page // PAGE)
            read, write = [], []
        return PassArguments(
            cu_q,
            cu_k,
            max_q=max(self.new) + padding,
            max_k=max(lens) + 5,
            read=torch.tensor(read + [0] * (3 * padding), dtype=torch.int64),
            write=torch.tensor(write + [self.rows_per_page] * padding, dtype=torch.int64),
            block_table=table,
        )

    def check(self, args: PassArguments, padding: int, sinks=None, softcap: float | None = None) -> None:
        """Runs both layers and compares results and cache with what torch computes from the tokens."""
        pad = torch.full((1, 1, padding, DIM), torch.nan)
        q = torch.cat([self.q, pad.expand(1, HEADS, -1, -1)], 2)
        k, v = (torch.cat([each, pad.expand(1, KV_HEADS, -1, -1)], 2) for each in (self.k, self.v))
        for layer in range(LAYERS):
            earlier = self._earlier(layer)
            out = self.cache.forward(layer, q, k, v, args, scaling=None, softcap=softcap, sinks=sinks)
            assert out.shape == (1, q.shape[2], HEADS, DIM)
            assert not out[0, q.shape[2] - padding :].any()
            begin = 0
            for request, new in enumerate(self.new):
                span = slice(begin, begin + new)
                keys, values = (
                    torch.cat([old, each[0].transpose(0, 1)[span]])
                    for old, each in zip(earlier[request], (self.k, self.v), strict=True)
                )
                expected, _ = attend(
                    self.q[0].transpose(0, 1)[span],
                    keys,
                    values,
                    window=self.window,
                    logit_cap=softcap or 0.0,
                    sinks=sinks,
                )
                torch.testing.assert_close(out[0, span], expected.to(out.dtype), atol=1e-5, rtol=1e-5)
                self._check_stored(layer, request, span)
                begin += new

    def _earlier(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns copies of the keys and values that each request has in the cache of a layer."""
        found = []
        for request, past in enumerate(self.past):
            first = max(0, past - self.window + 1) if self.window else 0
            index = torch.tensor([self.row(request, token) for token in range(first, past)], dtype=torch.int64)
            flat = self.memory.view(-1, KV_HEADS, DIM)
            found.append(tuple(flat[index + (2 * layer + each) * PAGE].clone() for each in range(2)))
        return found

    def _check_stored(self, layer: int, request: int, span: slice) -> None:
        new, past = self.new[request], self.past[request]
        first = max(0, new - self.window) if self.window else 0
        flat = self.memory.view(-1, KV_HEADS, DIM)
        rows = torch.tensor([self.row(request, past + i) for i in range(first, new)])
        for each, tensor in enumerate((self.k, self.v)):
            stored = flat[rows + (2 * layer + each) * PAGE]
            assert torch.equal(stored, tensor[0].transpose(0, 1)[span][first:])


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("past", [[0, 17, 8], [0, 0, 0]])
def test_rows_of_pages(past, padding):
    requests = Requests(past, [5, 9, 1])
    requests.check(requests.arguments(padding=padding), padding)


def test_empty_read_index_reads_the_new_tokens():
    requests = Requests([0, 0], [5, 20])
    args = requests.arguments(padding=0)
    requests.check(PassArguments(args.cu_q, args.cu_k, args.max_q, 20, args.read[:0], args.write), 0)


@pytest.mark.parametrize("padding", [0, 2])
def test_block_tables(padding):
    requests = Requests([0, 17, 8, 15, 16], [1] * 5)
    requests.check(requests.arguments(padding=padding, block_table=True), padding)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("past", [[0, 17, 8], [40, 15, 16], [0, 0, 0]])
def test_rings_of_windows(past, padding):
    """The window of 16 is two pages; the second request has more new tokens than that."""
    requests = Requests(past, [5, 21, 1], window=16)
    requests.check(requests.arguments(padding=padding), padding, torch.linspace(-1, 1, HEADS))


def test_soft_cap():
    requests = Requests([0, 17, 8], [5, 9, 1])
    requests.check(requests.arguments(padding=0), 0, softcap=0.5)


def test_layers_of_a_group_with_other_needs_are_refused():
    requests = Requests([0], [3])
    args = requests.arguments(padding=0)
    requests.cache.forward(0, requests.q, requests.k, requests.v, args, scaling=0.1, softcap=None, sinks=None)
    with pytest.raises(NotImplementedError, match="layer 1 needs"):
        requests.cache.forward(1, requests.q, requests.k, requests.v, args, scaling=0.2, softcap=None, sinks=None)
