# SPDX-License-Identifier: Apache-2.0
"""Removes GPU code from shared libraries, so that the kernels of a serving engine can be carried to another machine.

A library's section .nv_fatbin holds containers, a container holds entries: machine code (ELF) or PTX of one
architecture, which is compressed with Zstandard or not. An entry that is removed becomes zeros, so nothing moves and
the library compresses well. Only its own kernels can no longer be launched, because a module is loaded when the first
of its kernels is.
"""

import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
_ENTRY = struct.Struct("<HHIQIIHHIQQQ")
_MAGIC = 0xBA55ED50
_ELF_ENTRY = 2
_COMPRESSED = 0x8000


@dataclass
class Entry:
    """One entry: its place in the library, its architecture, whether it is machine code, and the bytes of its
    compressed form, 0 without one."""

    begin: int
    size: int
    sm: int
    is_elf: bool
    packed: int


def cut(library: Path, sm: int, unused: re.Pattern[str]) -> tuple[int, int]:
    """Keeps machine code of one architecture, without entries whose kernels all match `unused`, by their demangled
    names. Returns the bytes of entries before and after."""
    data = bytearray(library.read_bytes())
    before = after = 0
    for entry in entries(data):
        before += entry.size
        code = data[entry.begin : entry.begin + entry.size]
        if entry.is_elf and entry.sm == sm and not all(unused.search(name) for name in kernels(code, entry)):
            after += entry.size
        else:
            data[entry.begin : entry.begin + entry.size] = bytes(entry.size)
    library.write_bytes(data)
    return before, after


def entries(data: bytes | bytearray) -> Iterator[Entry]:
    """Returns the entries of every container of a library."""
    for name, begin, size in _sections(data):
        place, end = begin, begin + size
        while name == ".nv_fatbin" and place + _CONTAINER.size <= end:
            magic, _, header, content = _CONTAINER.unpack_from(data, place)
            if magic != _MAGIC:
                place += 8  # padding
                continue
            yield from _container(data, place + header, place + header + content)
            place += header + content


def _container(data: bytes | bytearray, place: int, end: int) -> Iterator[Entry]:
    while place < end:
        kind, _, header, size, packed, _, _, _, sm, _, flags, _ = _ENTRY.unpack_from(data, place)
        yield Entry(place + header, size, sm, kind == _ELF_ENTRY, packed if flags & _COMPRESSED else 0)
        place += header + size


def kernels(code: bytes | bytearray, entry: Entry) -> list[str]:
    """Returns the kernels of an entry of machine code. One without a name stands for code that every kernel needs."""
    if entry.packed > 0:
        code = subprocess.run(["zstd", "-dcq"], input=bytes(code[: entry.packed]), capture_output=True).stdout
    if code[:4] != b"\x7fELF":
        raise ValueError(f"the entry at {entry.begin} holds no machine code, or its compression is not Zstandard")
    names = [name.removeprefix(".text.") for name, _, _ in _sections(code) if name.startswith(".text.")]
    demangled = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, check=True, text=True)
    return demangled.stdout.splitlines() or [""]


def _sections(data: bytes | bytearray) -> Iterator[tuple[str, int, int]]:
    """Returns name, offset and bytes of the sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(count)]
    strings = headers[names][4]
    for name, _, _, _, begin, length in headers:
        yield data[strings + name : data.index(0, strings + name)].decode(), begin, length
