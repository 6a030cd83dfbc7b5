# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of continuous batching on a GPU: Fovea, sdpa and FlashAttention-3.

    python3 python/tests_torch/gpu_transformers_bench.py [--fa3 _vllm_fa3_C.abi3.so[.xz]]

The model has Qwen3-8B's shape and random weights. `--fa3` names the kernel library of a vLLM 0.24 wheel
(vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so); without it the third implementation is left out. sdpa reads all keys of the
batch for every token, so it runs fewer new tokens; Fovea runs both numbers. A run that does not end in LIMIT seconds
ends the program with the stacks of all threads.
"""

import argparse
import faulthandler
import gc
import logging
import lzma
import tempfile
import time

import fovea.transformers
import torch
import triton
import triton.language as tl
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen3Config
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations.flash_paged import paged_attention_forward
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

FA3_NAME = "vllm_flash_3"
BLOCK = 256
LIMIT = 90


def fa3_forward(
    q,
    k,
    v,
    *,
    cu_q=None,
    cu_k=None,
    used=None,
    max_q=None,
    max_k=None,
    table=None,
    scale,
    causal,
    window,
    softcap=0.0,
    sinks=None,
    splits=1,
):
    """Calls the kernel of the vLLM wheel. q is [tokens, heads, dim] with cu_q, else [batch, tokens, heads, dim].
    splits is flash-attention's default of the function, 0 lets the kernel choose."""
    return torch.ops._vllm_fa3_C.fwd(
        q,
        k,
        v,
        None,
        None,
        None,
        None,
        cu_q,
        cu_k,
        None,
        None,
        used,
        max_q,
        max_k,
        table,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        scale,
        causal,
        window[0],
        window[1],
        softcap,
        True,
        None,
        splits,
        None,
        0,
        sinks,
        1,
        0,
        None,
    )[0]


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, s_aux=None):
    """flash-attention's function of this name."""
    return fa3_forward(
        q,
        k,
        v,
        scale=softmax_scale or q.shape[-1] ** -0.5,
        causal=causal,
        window=window_size,
        softcap=softcap,
        sinks=s_aux,
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    s_aux=None,
):
    """flash-attention's function of this name."""
    return fa3_forward(
        q,
        k,
        v,
        cu_q=cu_seqlens_q,
        cu_k=cu_seqlens_k,
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        sinks=s_aux,
    )


@triton.jit
def append_kernel(k, v, k_cache, v_cache, lens, table, table_stride, page: tl.constexpr, width: tl.constexpr):
    """Copies a request's new row of keys and values, width values wide, to its place in the cache."""
    request = tl.program_id(0)
    length = tl.load(lens + request)
    if length >= 0:
        slot = tl.load(table + request * table_stride + length // page).to(tl.int64) * page + length % page
        columns = tl.arange(0, width)
        tl.store(k_cache + slot * width + columns, tl.load(k + request * width + columns))
        tl.store(v_cache + slot * width + columns, tl.load(v + request * width + columns))


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    cache_seqlens=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    s_aux=None,
):
    """flash-attention's function of this name, for one new token a request. The kernel of the wheel appends no keys,
    so another one does. cache_seqlens is -1 in rows of padding."""
    page, width = k_cache.shape[1], k_cache[0, 0].numel()
    append_kernel[(len(q),)](k, v, k_cache, v_cache, cache_seqlens, block_table, block_table.stride(0), page, width)
    return fa3_forward(
        q,
        k_cache,
        v_cache,
        used=cache_seqlens + 1,
        table=block_table,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        sinks=s_aux,
        splits=0,
    )


def load_fa3(path: str) -> None:
    """Loads the kernel library and makes it the flash functions of the implementation FA3_NAME."""
    if path.endswith(".xz"):
        with lzma.open(path) as packed, tempfile.NamedTemporaryFile(suffix=".so", delete=False) as unpacked:
            while block := packed.read(1 << 24):
                unpacked.write(block)
        path = unpacked.name
    torch.ops.load_library(path)
    names = (FA3_NAME, f"paged|{FA3_NAME}")
    imports, check = flash_utils._lazy_imports, PreTrainedModel._check_and_adjust_attn_implementation
    functions = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
    flash_utils._lazy_imports = lambda name, *args, **kwargs: (
        (*functions, flash_utils._pad_input, flash_utils._unpad_input)
        if name in names
        else imports(name, *args, **kwargs)
    )
    PreTrainedModel._check_and_adjust_attn_implementation = lambda self, name, *args, **kwargs: (
        name if name in names else check(self, name, *args, **kwargs)
    )
    AttentionInterface.register(names[1], paged_attention_forward)


def make_model(layers: int) -> torch.nn.Module:
    """Returns a model of Qwen3-8B's shape with random weights on the GPU."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def run(model, name: str, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """Returns the new tokens of each prompt and the seconds, without the time of a first run of 8 tokens a prompt."""
    model.set_attn_implementation(f"paged|{name}")
    pages = sum(-(-(len(prompt) + new) // BLOCK) for prompt in prompts) + 2 * len(prompts)
    batching = ContinuousBatchingConfig(
        block_size=BLOCK,
        num_blocks=pages,
        max_batch_tokens=8192,
        max_requests_per_batch=len(prompts),
        max_blocks_per_request=-(-(max(map(len, prompts)) + new) // BLOCK) + 2 if "flash" in name else 0,
        allow_block_sharing=False,
        # Passes with prompts have sizes that hardly repeat, so graphs of them cost more than they save.
        use_cuda_graph=(False, True) if "flash" in name else None,
    )
    generation = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with (
        torch.no_grad(),
        model.continuous_batching_context_manager(
            generation_config=generation,
            continuous_batching_config=batching,
            block=True,
            timeout=30,
            # transformers' warm-up runs a pass over all keys of the cache, which the kernel of the wheel does not end.
            warmup=False,
        ) as manager,
    ):
        found: dict[str, list[int]] = {}
        for round_prompts, tokens in ((prompts, 8), (prompts, new)):
            found.clear()
            torch.cuda.synchronize()
            start = time.perf_counter()
            names = [manager.add_request(list(prompt), max_new_tokens=tokens) for prompt in round_prompts]
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error:
                        raise RuntimeError(f"{name}: {result.error}")
                    found[result.request_id] = result.generated_tokens
                elif not manager.is_running():
                    raise RuntimeError(f"{name}: the generation loop ended early")
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
    gc.collect()
    torch.cuda.empty_cache()
    return [found[each] for each in names], seconds


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Returns the first place where two continuations differ, None if the shorter begins the longer."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def compare(model, prompts, labels: tuple[str, str], one, other, checked: int = 4) -> None:
    """Prints the part of equal continuations, and logit gaps at the first differences of some prompts."""
    places = [first_difference(a, b) for a, b in zip(one, other, strict=True)]
    length = min(len(one[0]), len(other[0]))
    equal = sum(place is None for place in places)
    print(f"{labels[0]} and {labels[1]}: {equal} of {len(places)} continuations of {length} tokens are equal")
    model.set_attn_implementation(fovea.transformers.PLAIN_NAME)
    differing = [i for i, place in enumerate(places) if place is not None][:checked]
    for i in differing:
        place = places[i]
        tokens = torch.tensor([prompts[i] + one[i][:place]], device="cuda")
        with torch.no_grad():
            logits = model(tokens, logits_to_keep=1).logits[0, -1].float()
        gap = logits[one[i][place]] - logits[other[i][place]]
        print(
            f"  prompt {i}: first difference at token {place}, logit gap {gap.item():+.4f}, "
            f"standard deviation of the logits {logits.std().item():.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fa3", help="kernel library of a vLLM wheel, .so or .so.xz")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--sdpa-new", type=int, default=16, help="new tokens of the run of sdpa; 0: no run")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)

    ours = fovea.transformers.register()[0]
    model = make_model(options.layers)
    lengths = torch.linspace(1024, 4096, options.prompts).int().tolist()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 151936, (length,), generator=generator).tolist() for length in lengths]
    total = sum(lengths)
    print(
        f"{torch.cuda.get_device_name()}, {options.layers} layers, {len(prompts)} prompts of {min(lengths)} to "
        f"{max(lengths)} tokens, {total} in all"
    )

    runs: list[tuple[str, int]] = [(ours, options.new)]
    if options.sdpa_new:
        runs += [(ours, options.sdpa_new), ("sdpa", options.sdpa_new)]
    if options.fa3:
        load_fa3(options.fa3)
        runs.append((FA3_NAME, options.new))
    else:
        print("flash_attention_3 is absent: give --fa3 _vllm_fa3_C.abi3.so of a vLLM 0.24 wheel")
    found: dict[tuple[str, int], list[list[int]]] = {}
    print(f"{'implementation':16} {'new':>5} {'seconds':>8} {'new tokens/s':>13} {'all tokens/s':>13}")
    for name, new in runs:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        tokens, seconds = run(model, name, prompts, new)
        faulthandler.cancel_dump_traceback_later()
        found[name, new] = tokens
        made = new * len(prompts)
        print(f"{name:16} {new:5} {seconds:8.2f} {made / seconds:13.0f} {(made + total) / seconds:13.0f}", flush=True)
    for (name, new), tokens in found.items():
        if name != ours:
            compare(model, prompts, (ours, name), found[ours, new], tokens)


if __name__ == "__main__":
    main()
