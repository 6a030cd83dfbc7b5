# SPDX-License-Identifier: Apache-2.0
"""Packs a serving engine and its imports for a machine with an H100 or H200 and without a network. Wheels come from
PyPI and stay in ~/.cache/fovea."""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import empty_package
import fatbins
from wheel_contract import CACHE

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import gpu_bundle

SM = 90
_STAND_IN = "from empty_package import stand_in\n\nstand_in(__name__, {!r})\n"
# The other machine has these; what is downloaded must fit them.
_PRESENT = ["numpy==2.5.2", "requests==2.34.2", "typing_extensions==4.16.0", "pillow==12.3.0"]
_PLATFORMS = ["manylinux_2_28", "manylinux_2_34", "manylinux_2_31", "manylinux_2_17", "manylinux2014"]


def download(name: str, python: str, with_dependencies: list[str], alone: list[str]) -> Path:
    """Returns a folder with the wheels of packages for a version of Python: with all they need, or alone."""
    folder = CACHE / name / python
    wanted = "\n".join([*with_dependencies, "", *alone]) + "\n"
    complete = folder / "complete"
    if complete.exists() and complete.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(_PRESENT) + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--only-binary=:all:"]
    pip += ["--python-version", python, "--implementation", "cp"]
    pip += [f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")]
    pip += ["--platform=any", *[f"--platform={name}_x86_64" for name in _PLATFORMS]]
    subprocess.run([*pip, "--constraint", str(constraints), *with_dependencies], check=True)
    subprocess.run([*pip, "--no-deps", *alone], check=True)
    complete.write_text(wanted, encoding="utf-8")
    return folder


def unpack(wheels: Path, site: Path, left_out: re.Pattern[str]) -> None:
    """Unpacks wheels without the files whose names match."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site, [name for name in archive.namelist() if not left_out.search(name)])


def add_stand_ins(site: Path, versions: dict[str, str]) -> None:
    """Adds packages without a content, by name and version."""
    shutil.copy(empty_package.__file__, site)
    for name, version in versions.items():
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(_STAND_IN.format(version), encoding="utf-8")


def add_fovea(wheel: Path, site: Path) -> None:
    """Unpacks Fovea's wheel, without kernels for other GPUs."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    pack = site / "fovea" / "kernels.pack"
    if not pack.exists():
        raise SystemExit(f"{wheel} has no kernels: run `make kernels` before `make python`")
    whole = pack.rename(site / "whole.pack")
    gpu_bundle.cut_pack(whole, pack, str(SM))
    whole.unlink()


def cut_libraries(site: Path, unused: re.Pattern[str]) -> None:
    """Removes GPU code for other architectures and unused kernels, and the symbols that only debuggers read."""
    for library in sorted(site.rglob("*.so")):
        subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
        before, after = fatbins.cut(library, SM, unused)
        if before > 0:
            print(f"{library.name}: {after / 1e6:.1f} MB of {before / 1e6:.1f} MB of GPU code", flush=True)


def parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that packs have in common."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("output", type=Path)
    made.add_argument("--python", default="3.12", help="version of Python of the other machine")
    made.add_argument("--wheel", type=Path, help="Fovea's wheel")
    return made


def write(output: Path, fill: Callable[[Path], None]) -> None:
    """Writes what fill(site) puts into a folder as an archive."""
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder))
        packer = "xz --threads=1 --lzma2=preset=6,dict=256MiB"
        subprocess.run(["tar", "-C", folder, "--sort=name", "-I", packer, "-cf", output.resolve(), "."], check=True)
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
