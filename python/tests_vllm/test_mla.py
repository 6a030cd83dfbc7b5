# SPDX-License-Identifier: Apache-2.0
"""MLA layers of the plug-in. vLLM refuses MLA on a CPU, so no engine runs here."""

import pytest
import torch
from checkpoints import model_folder
from fovea.vllm.mla import MlaImpl, MlaMetadataBuilder
from layers import BLOCK, BLOCKS, Pass, Request, add_layer, make_impl
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from attention import attention

HEADS, NOPE, ROPE, V_DIM, RANK, SCALE = 4, 32, 16, 32, 64, 0.144


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = model_folder("llama", tmp_path_factory.mktemp("models"))
    arguments = EngineArgs(
        model=str(folder), dtype="float32", max_model_len=128, block_size=BLOCK, max_num_batched_tokens=128
    )
    return arguments.create_engine_config()


def _impl(config, **options):
    widths = {
        "q_lora_rank": None,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE,
        "v_head_dim": V_DIM,
        "kv_b_proj": torch.nn.Identity(),
    }
    arguments = (HEADS, RANK + ROPE, SCALE, 1, None, None, options.pop("dtype", "auto"), None, "decoder", None)
    return make_impl(config, MlaImpl, *arguments, **(widths | options))


def _layer(config, name, impl, cache, weight):
    # As vLLM makes them of the weight of kv_b_proj, [heads * (nope + v), rank].
    w_uk, w_uv = weight.T.view(RANK, HEADS, NOPE + V_DIM).split([NOPE, V_DIM], dim=-1)
    return add_layer(config, name, impl, cache, W_UK_T=w_uk.permute(1, 2, 0), W_UV=w_uv.transpose(0, 1))


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_prompts_and_decodes(config, dtype):
    pass_ = Pass([Request(1, 70), Request(33, 33), Request(5, 40), Request(1, 1)])
    chance = torch.Generator().manual_seed(3)
    weight = torch.randn(HEADS * (NOPE + V_DIM), RANK, generator=chance) / 8
    rows = [torch.randn(request.kv_len, RANK + ROPE, generator=chance) for request in pass_.requests]
    q = torch.randn(pass_.tokens, HEADS, NOPE + ROPE, generator=chance)
    cache = torch.zeros(BLOCKS, BLOCK, RANK + ROPE)
    scale = 1.0
    if dtype == "fp8":
        cache, scale = cache.to(torch.float8_e4m3fn).view(torch.uint8), 0.02
        rows = [(row / scale).to(torch.float8_e4m3fn).float() * scale for row in rows]
    impl = _impl(config, dtype=dtype)
    name = f"layer {dtype}"
    layer = _layer(config, name, impl, cache, weight)
    layer._k_scale = torch.tensor(scale)
    new = []
    for request, slots, row in zip(pass_.requests, pass_.slots, rows, strict=True):
        old = request.kv_len - request.new_tokens
        values = (row / scale).to(torch.float8_e4m3fn).view(torch.uint8) if dtype == "fp8" else row
        for slot, value in zip(slots[:old], values, strict=False):
            cache[slot // BLOCK, slot % BLOCK] = value
        new.append(row[old:])
    latent, k_rope = torch.cat(new).split([RANK, ROPE], dim=1)
    builder = MlaMetadataBuilder(
        MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=RANK + ROPE, dtype=cache.dtype),
        [name],
        config,
        torch.device("cpu"),
    )
    metadata = builder.build(0, pass_.common())
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (0, 0)
    out = torch.zeros(pass_.tokens, HEADS * V_DIM)
    impl.forward_mha(q, latent, k_rope.unsqueeze(1), cache, metadata, layer._k_scale, out)
    expected = _expected(pass_, rows, q, weight)
    torch.testing.assert_close(out, expected, atol=2e-3 if dtype == "fp8" else 1e-4, rtol=1e-3)


def _expected(pass_, rows, q, weight):
    w_uk, w_uv = weight.view(HEADS, NOPE + V_DIM, RANK).split([NOPE, V_DIM], dim=1)
    outputs, first = [], 0
    for request, row in zip(pass_.requests, rows, strict=True):
        k_nope = torch.einsum("sl,hpl->shp", row[:, :RANK], w_uk)
        v = torch.einsum("sl,hvl->shv", row[:, :RANK], w_uv)
        k = torch.cat([k_nope, row[:, None, RANK:].expand(-1, HEADS, -1)], dim=2)
        outputs.append(attention(q[first : first + request.new_tokens], k, v, SCALE).flatten(1))
        first += request.new_tokens
    return torch.cat(outputs).float()


def test_what_it_does_not_serve_is_named(config):
    with pytest.raises(NotImplementedError, match="indexer"):
        _impl(config, indexer=object())
