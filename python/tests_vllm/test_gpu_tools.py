# SPDX-License-Identifier: Apache-2.0
"""The parts of the scripts for GPUs that need none."""

import re
import struct
import subprocess

import exact_logprobs
import fatbins
import pytest
import torch
from gpu_comparison import compare_tokens
from gpu_waits import waits_in_ranges
from pack_for_gpu import unused_kernels


def _elf(sections: dict[str, bytes]) -> bytes:
    """Returns a 64-bit ELF file with sections, as far as fatbins reads it."""
    strings, data, headers = b"\0", b"", b""
    sections = sections | {".shstrtab": b""}
    names = {name: len(strings := strings + name.encode() + b"\0") - len(name) - 1 for name in sections}
    sections[".shstrtab"] = strings
    for name, content in sections.items():
        data += bytes(-(64 + len(data)) % 8)
        headers += struct.pack("<IIQQQQ24x", names[name], 1, 0, 0, 64 + len(data), len(content))
        data += content
    file = struct.pack("<4s36xQ10xHHH", b"\x7fELF", 64 + len(data), 64, len(sections), len(sections) - 1)
    return file + data + headers


def _entry(code: bytes, sm: int, *, kind: int = 2, packed: bool = False) -> bytes:
    content = subprocess.run(["zstd", "-c"], input=code, capture_output=True, check=True).stdout if packed else code
    padded = content + bytes(-len(content) % 8)
    flags = 0x8000 if packed else 0
    header = struct.pack("<HHIQIIHHIQQQQ", kind, 1, 64, len(padded), len(content), 0, 0, 0, sm, 0, flags, 0, len(code))
    return header + padded


def _library(*containers: list[bytes]) -> bytes:
    section = b"".join(
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries) + bytes(8)
        for entries in containers
    )
    return _elf({".text": b"host code", ".nv_fatbin": section})


_WANTED, _OTHER = (_elf({f".text.{name}": b"sass"}) for name in ("_Z6wantedPf", "_Z7marlinAPf"))
_BOTH = _elf({".text._Z6wantedPf": b"sass", ".text._Z7marlinAPf": b"sass"})


@pytest.mark.parametrize("packed", [False, True])
def test_code_of_other_architectures_and_unused_kernels_become_zeros(tmp_path, packed):
    ptx = _entry(b"ptx" * 8, 90, kind=1)
    kept = [_entry(code, 90, packed=packed) for code in (_WANTED, _BOTH)]
    lost = [_entry(_OTHER, 90, packed=packed), _entry(_WANTED, 80, packed=packed)]
    library = tmp_path / "library.so"
    library.write_bytes(_library([*kept, ptx], lost))
    size = library.stat().st_size
    before, after = fatbins.cut(library, 90, re.compile("marlin"))
    data = library.read_bytes()
    assert len(data) == size
    assert after == sum(len(entry) - 64 for entry in kept)
    assert before == after + sum(len(entry) - 64 for entry in [ptx, *lost])
    codes = [bytes(data[each.begin : each.begin + each.size]) for each in fatbins.entries(data)]
    assert codes[:2] == [entry[64:] for entry in kept]
    assert all(not any(code) for code in codes[2:])
    assert b"host code" in data


def test_unknown_compression_is_an_error(tmp_path):
    entry = bytearray(_entry(_WANTED, 90, packed=True))
    entry[64:68] = b"none"
    library = tmp_path / "library.so"
    library.write_bytes(_library([bytes(entry)]))
    with pytest.raises(ValueError, match="is not Zstandard"):
        fatbins.cut(library, 90, re.compile("marlin"))


@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype", "cap", "used"),
    [
        (128, 128, "bfloat16_t", "false", True),
        (128, 128, "half_t", "false", True),
        (128, 128, "bfloat16_t", "true", False),
        (256, 256, "bfloat16_t", "true", True),
        (64, 512, "bfloat16_t", "false", True),
        (64, 256, "bfloat16_t", "false", False),
        (96, 96, "bfloat16_t", "false", False),
    ],
)
def test_kernels_of_flash_attention_are_known_by_their_heads(dim, value_dim, dtype, cap, used):
    one = "cute::C<1>"
    name = (
        f"flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute::tuple<{one}, {one}, {one} >, "
        f"cute::tuple<cute::C<128>, cute::C<160>, cute::C<{dim}> >, {value_dim}, cutlass::{dtype}, float, "
        f"cutlass::arch::Sm90, true, false, {cap}, true>, flash::CollectiveEpilogueFwd<cute::tuple<cute::C<128>, "
        f"cute::C<128>, cute::C<160> >, cutlass::bfloat16_t>"
    )
    assert (unused_kernels().search(name) is None) == used


def _event(name: str, begin: float, duration: float = 1, *, cat: str = "cuda_runtime", tid: int = 1, **arguments: int):
    return {"ph": "X", "name": name, "cat": cat, "tid": tid, "ts": begin, "dur": duration, "args": arguments}


_BUILD = _event("fovea build", 10, 20, cat="user_annotation")


@pytest.mark.parametrize(
    "event",
    [
        _event("cudaStreamSynchronize", 12),
        _event("cudaMemcpy", 12),
        _event("Stream Sync", 12, cat="cuda_sync", tid=7),
        _event("cudaMemcpyAsync", 12, correlation=5),
        _event("cudaMalloc", 12),
        _event("cudaEventSynchronize", 12, tid=2),
    ],
)
def test_a_wait_in_the_builder_is_found(event):
    copy = _event("Memcpy DtoH (Device -> Pageable)", 14, cat="gpu_memcpy", tid=7, correlation=5)
    assert waits_in_ranges([_BUILD, event, copy])["waits"] == {event["name"]: 1}
    outside = waits_in_ranges([_BUILD, event | {"ts": 31}, copy])
    assert outside["waits"] == {}
    assert outside["waits_elsewhere"] == {event["name"]: 1}


def test_launches_and_copies_to_the_device_do_not_wait():
    calls = [
        _event("cudaLaunchKernel", 12),
        _event("cudaMemcpyAsync", 13, correlation=6),
        _event("cuLaunchKernelEx", 14),
    ]
    on_the_gpu = _event("Stream Wait Event", 15, cat="cuda_sync", tid=7)
    range_on_the_gpu = _BUILD | {"cat": "gpu_user_annotation", "ts": 100}
    later = _event("cudaStreamSynchronize", 105)
    found = waits_in_ranges([_BUILD, *calls, on_the_gpu, range_on_the_gpu, later])
    assert found["waits"] == {}
    assert found["calls"] == {
        "cudaLaunchKernel": 1,
        "cudaMemcpyAsync": 1,
        "cuLaunchKernelEx": 1,
        "Stream Wait Event": 1,
    }
    assert found["ranges"] == {"fovea build": 1}


def test_tokens_are_equal_up_to_near_ties():
    own = [[[1, -0.5, -0.9], [2, -0.5, -0.53]], [[1, -0.5, -0.9], [2, -0.5, -0.9]]]
    others = [[[1, -0.51, -0.9], [3, -0.5, -0.53]], own[1]]
    line, agree = compare_tokens(own, others)
    assert line.startswith(
        "1 of 2 prompts have equal tokens, 0 more until a near tie, largest gap where tokens part 0.03"
    )
    assert "differ by 0.0100 at most" in line
    assert not agree
    assert compare_tokens(own, others, near_tie=0.05)[1]


def test_logprobs_are_compared_with_those_after_each_token():
    class Model:
        device = torch.device("cpu")

        def __call__(self, tokens):
            """Every token is followed by the next number, with a logit of 3."""
            logits = torch.zeros(*tokens.shape, 8)
            logits.scatter_(2, tokens[:, :, None] + 1, 3.0)
            return type("Output", (), {"logits": logits})

    exact = float(torch.tensor([3.0] + [0.0] * 7).log_softmax(0)[0])
    steps = [[3, exact, -9.0], [4, exact + 0.25, -9.0]]
    torch.testing.assert_close(exact_logprobs.differences(Model(), [1, 2], steps), torch.tensor([0.0, 0.25]))
