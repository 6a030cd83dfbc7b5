# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism: ranks are threads, and the collectives are those of `Ranks`, because vLLM's merge is
written in Triton and vLLM refuses such an engine on a CPU."""

import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from checkpoints import model_folder
from fovea.vllm.context import Shards
from fovea.vllm.metadata import MetadataBuilder
from fovea.vllm.mha import MhaBackend, MhaImpl
from fovea.vllm.mla import MlaBackend, MlaImpl, MlaMetadataBuilder
from layers import BLOCK, BLOCKS, Pass, Request, add_layer, make_impl
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.attention.ops import common
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from attention import attention

HEADS, DIM, SCALE = 4, 64, 0.125  # heads of a rank; with DCP it has one kv head
NOPE, ROPE, V_DIM, RANK = 32, 16, 32, 64
PASSES = {
    "decodes": [Request(1, 45), Request(1, 1), Request(1, 2), Request(1, 100)],
    "mixed": [Request(1, 45), Request(20, 20), Request(7, 100), Request(1, 1)],
    "verification": [Request(3, 50), Request(3, 3), Request(3, 90)],
}
SHARDS = [(2, 1), (3, 1), (2, BLOCK), (4, 4)]  # ranks, interleave


class Ranks:
    """Ranks whose collectives meet in memory. rank(r) is vLLM's group as rank r sees it."""

    def __init__(self, count: int):
        self.count = count
        self.local = threading.local()
        self._places: list[torch.Tensor | None] = [None] * count
        self._barrier = threading.Barrier(count, timeout=60)

    def rank(self, rank: int) -> SimpleNamespace:
        return SimpleNamespace(
            world_size=self.count,
            rank_in_group=rank,
            all_gather=lambda x, dim: torch.cat(self._exchange(rank, x), dim=dim),
            reduce_scatter=lambda x, dim: sum(self._exchange(rank, x)).chunk(self.count, dim=dim)[rank],
        )

    def run(self, work) -> list[torch.Tensor]:
        """Returns what work(rank) gives on each rank."""
        results: list[torch.Tensor | BaseException | None] = [None] * self.count

        def one(rank: int) -> None:
            self.local.group = self.rank(rank)
            try:
                results[rank] = work(rank)
            except BaseException as error:
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
                raise result
        return results

    def _exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._places[rank] = x
        self._barrier.wait()
        everything = list(self._places)
        self._barrier.wait()
        return everything


def _merge(out, lse, group, return_lse=False, is_lse_base_on_e=True):
    """Computes what cp_lse_ag_out_rs() of vLLM does."""
    assert is_lse_base_on_e
    parts = group.all_gather(lse.unsqueeze(0), dim=0)
    total = parts.logsumexp(0)
    weight = torch.where(lse == -torch.inf, 0.0, (lse - total).exp())
    merged = group.reduce_scatter(out * weight.unsqueeze(2), dim=1)
    own = total.chunk(group.world_size, dim=1)[group.rank_in_group]
    return (merged, own) if return_lse else merged


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def config(folder):
    arguments = EngineArgs(
        model=str(folder), dtype="float32", max_model_len=128, block_size=BLOCK, max_num_batched_tokens=128
    )
    return arguments.create_engine_config()


@pytest.fixture
def ranks(request, config, monkeypatch):
    count, interleave = request.param
    ranks = Ranks(count)
    monkeypatch.setattr(config.parallel_config, "decode_context_parallel_size", count)
    monkeypatch.setattr(config.parallel_config, "cp_kv_cache_interleave_size", interleave)
    monkeypatch.setattr(parallel_state, "get_dcp_group", lambda: ranks.local.group)
    monkeypatch.setattr(common, "cp_lse_ag_out_rs", _merge)
    ranks.interleave = interleave
    return ranks


@dataclass
class LocalPass:
    """A pass as one rank gets it: whole lengths, the rank's slots, and a table of blocks that span all ranks."""

    whole: Pass
    shards: Shards

    def slots(self, row: int) -> list[int]:
        """Returns the slot of each token of a request, -1 for those on other ranks."""
        wide = BLOCK * self.shards.ranks
        slots = []
        for place in range(self.whole.requests[row].kv_len):
            owner = place // self.shards.interleave % self.shards.ranks
            within = place % wide // (self.shards.interleave * self.shards.ranks) * self.shards.interleave
            within += place % self.shards.interleave
            block = int(self.whole.table[row, place // wide])
            slots.append(block * BLOCK + within if owner == self.shards.rank else -1)
        return slots

    def common(self):
        new = []
        for row, request in enumerate(self.whole.requests):
            new += self.slots(row)[request.kv_len - request.new_tokens :]
        made = self.whole.common()
        local = get_dcp_local_seq_lens(made.seq_lens, self.shards.ranks, self.shards.rank, self.shards.interleave)
        return made.replace(slot_mapping=torch.tensor(new), dcp_local_seq_lens=local)


def _local_passes(ranks: Ranks, requests: list[Request]) -> list[LocalPass]:
    whole = Pass(requests)
    return [LocalPass(whole, Shards(ranks.count, rank, ranks.interleave)) for rank in range(ranks.count)]


def _store_old(local: LocalPass, rows: list[torch.Tensor], view: torch.Tensor) -> None:
    """Stores the rows of the tokens before the pass that are on the rank."""
    for row, (request, values) in enumerate(zip(local.whole.requests, rows, strict=True)):
        for slot, value in zip(local.slots(row)[: request.kv_len - request.new_tokens], values, strict=False):
            if slot >= 0:
                view[slot // BLOCK, slot % BLOCK] = value


def _new(requests: list[Request], rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([row[len(row) - request.new_tokens :] for request, row in zip(requests, rows, strict=True)])


@pytest.mark.parametrize("lens", [[0, 1, 2, 7, 31, 32, 33, 100]])
@pytest.mark.parametrize("shape", SHARDS)
def test_local_lengths_are_those_of_vllm(lens, shape):
    count, interleave = shape
    lens = torch.tensor(lens, dtype=torch.int32)
    for rank in range(count):
        expected = get_dcp_local_seq_lens(lens, count, rank, interleave)
        torch.testing.assert_close(Shards(count, rank, interleave).local_lens(lens), expected)


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 2.0}, {"sinks": True}], ids=["plain", "cap", "sinks"])
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("ranks", SHARDS, indirect=True, ids=str)
def test_heads_of_keys_and_values(config, ranks, name, options):
    requests = PASSES[name]
    chance = torch.Generator().manual_seed(3)
    heads = HEADS * ranks.count
    tokens = sum(request.new_tokens for request in requests)
    q = torch.randn(tokens, heads, DIM, generator=chance)
    k, v = ([torch.randn(request.kv_len, 1, DIM, generator=chance) for request in requests] for _ in range(2))
    sinks = torch.linspace(-1, 2, heads) if "sinks" in options else None
    own_q = q.chunk(ranks.count, dim=1)
    layers = []
    for rank, local in enumerate(_local_passes(ranks, requests)):
        ranks.local.group = ranks.rank(rank)
        own = options | ({} if sinks is None else {"sinks": sinks.chunk(ranks.count)[rank]})
        impl = make_impl(config, MhaImpl, HEADS, DIM, SCALE, 1, **own)
        impl.process_weights_after_loading(torch.float32)
        cache = torch.zeros(BLOCKS, 2, BLOCK, 1, DIM)
        for rows, view in zip((k, v), cache.unbind(1), strict=True):
            _store_old(local, rows, view)
        layer = add_layer(config, f"layer {rank}", impl, cache)
        builder = MetadataBuilder(_spec(FullAttentionSpec), [f"layer {rank}"], config, torch.device("cpu"))
        assert impl.need_to_return_lse_for_decode  # vLLM asks every layer
        layers.append((impl, layer, builder.build(0, local.common())))

    def run(rank):
        impl, layer, metadata = layers[rank]
        out = torch.full((tokens + 2, HEADS, DIM), 7.0)
        padded = [torch.cat([x, x[:2]]) for x in (own_q[rank], _new(requests, k), _new(requests, v))]
        return impl.forward(layer, *padded, layer.kv_cache, metadata, out)

    outs = ranks.run(run)
    scores = {"logit_cap": options.get("logits_soft_cap"), "sinks": sinks}
    expected, first = [], 0
    for request, keys, values in zip(requests, k, v, strict=True):
        expected.append(attention(q[first : first + request.new_tokens], keys, values, SCALE, **scores))
        first += request.new_tokens
    for rank, out in enumerate(outs):
        reference = torch.cat(expected).chunk(ranks.count, dim=1)[rank].float()
        torch.testing.assert_close(out[:tokens], reference, atol=1e-5, rtol=1e-4)
        assert (out[tokens:] == 7).all()


def _spec(kind):
    return kind(block_size=BLOCK, num_kv_heads=1, head_size=DIM, dtype=torch.float32)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("ranks", SHARDS, indirect=True, ids=str)
def test_latents(config, ranks, name):
    requests = PASSES[name]
    chance = torch.Generator().manual_seed(3)
    heads = HEADS * ranks.count
    tokens = sum(request.new_tokens for request in requests)
    q = torch.randn(tokens, heads, RANK + ROPE, generator=chance)  # absorbed
    rows = [torch.randn(request.kv_len, RANK + ROPE, generator=chance) for request in requests]
    latent, k_rope = _new(requests, rows).split([RANK, ROPE], dim=1)
    layers = []
    for rank, local in enumerate(_local_passes(ranks, requests)):
        ranks.local.group = ranks.rank(rank)
        widths = {
            "q_lora_rank": None,
            "kv_lora_rank": RANK,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "qk_head_dim": NOPE + ROPE,
            "v_head_dim": V_DIM,
            "kv_b_proj": torch.nn.Identity(),
        }
        arguments = (HEADS, RANK + ROPE, SCALE, 1, None, None, "auto", None, "decoder", None)
        impl = make_impl(config, MlaImpl, *arguments, **widths)
        cache = torch.zeros(BLOCKS, BLOCK, RANK + ROPE)
        _store_old(local, rows, cache)
        up = {"W_UK_T": torch.zeros(HEADS, NOPE, RANK), "W_UV": torch.zeros(HEADS, RANK, V_DIM)}
        layer = add_layer(config, f"layer {rank}", impl, cache, **up)
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=RANK + ROPE, dtype=torch.float32)
        builder = MlaMetadataBuilder(spec, [f"layer {rank}"], config, torch.device("cpu"))
        assert impl.need_to_return_lse_for_decode
        layers.append((impl, layer, builder.build(0, local.common())))

    def run(rank):
        impl, layer, metadata = layers[rank]
        assert (metadata.num_decode_tokens, metadata.num_prefills) == (tokens, 0)
        impl.do_kv_cache_update(latent, k_rope.unsqueeze(1), layer.kv_cache, metadata.slot_mapping, "auto", None)
        out, lse = impl.forward_mqa(q, layer.kv_cache, metadata, layer)
        return _merge(out, lse, ranks.local.group)

    outs = ranks.run(run)
    first = 0
    for request, row in zip(requests, rows, strict=True):
        new = slice(first, first + request.new_tokens)
        expected = attention(q[new], row[:, None, :], row[:, None, :RANK], SCALE).chunk(ranks.count, dim=1)
        for out, reference in zip(outs, expected, strict=True):
            torch.testing.assert_close(out[new], reference.float(), atol=1e-5, rtol=1e-4)
        first += request.new_tokens


@pytest.mark.parametrize("ranks", [(2, 1)], indirect=True)
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"sliding_window": 9}, "a window of 9"), ({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, "ALiBi")],
)
def test_distances_are_refused(config, ranks, options, reason):
    ranks.local.group = ranks.rank(0)
    with pytest.raises(NotImplementedError, match=f"decode context parallelism: {reason} measures distances"):
        make_impl(config, MhaImpl, HEADS, DIM, SCALE, 1, **options)


def test_without_ranks_no_lse_is_asked_for(config):
    impl = make_impl(config, MhaImpl, HEADS, DIM, SCALE, 1)
    assert not impl.need_to_return_lse_for_decode
    assert impl.can_return_lse_for_decode
    assert (MhaBackend.get_impl_cls(), MlaBackend.get_impl_cls()) == (MhaImpl, MlaImpl)
