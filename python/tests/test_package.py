# SPDX-License-Identifier: Apache-2.0
"""The package: its metadata, its stubs, its size, its command line tool."""

import ast
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys

import fovea
import pytest
from fovea import _core

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = pathlib.Path(_core.__file__).parent


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


def test_version_is_that_of_the_headers():
    header = (ROOT / "include/fovea/version.h").read_text()
    numbers = re.findall(r"#define FOVEA_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)
    assert fovea.__version__ == ".".join(numbers)


def test_metadata():
    try:
        metadata = importlib.metadata.metadata("fovea")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package runs from a build folder")
    assert metadata["Version"] == fovea.__version__ and metadata["License-Expression"] == "Apache-2.0"
    needs = importlib.metadata.requires("fovea")
    assert [need for need in needs if "extra" not in need] == ["nanobind-backend<2,>=1.0"]
    files = {str(path) for path in importlib.metadata.files("fovea")}
    assert {"fovea/py.typed", "fovea/_core.pyi", "fovea/_core.abi3.so", "fovea/licenses/nanobind.txt"} <= files
    assert sum(path.locate().stat().st_size for path in importlib.metadata.files("fovea")) <= 64 * 2**20


def stub_names(nodes):
    """Returns {name: names inside a class, or None}."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            names[node.name] = stub_names(node.body)
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = None
        elif isinstance(node, ast.AnnAssign):
            names[node.target.id] = None
        elif isinstance(node, ast.Assign):
            names[node.targets[0].id] = None
        elif isinstance(node, ast.ImportFrom) and node.module == "fovea._error":
            names["Error"] = None
    return names


ONLY_IN_STUBS = {"Array", "Prompt"}
# Every value type and enumeration has these.
COMMON = {"__init__", "__getstate__", "__setstate__", "__eq__", "__hash__", "__repr__", "__str__"}


def test_stubs_name_what_the_module_has():
    stubs = stub_names(ast.parse((FOLDER / "_core.pyi").read_text()).body)
    module = {name for name in dir(_core) if not name.startswith("_")} | {"__version__"}
    assert set(stubs) - ONLY_IN_STUBS == module
    for name in sorted(module):
        inside = stubs[name]
        if inside is None or name == "Error":
            continue
        own = {member for member in vars(getattr(_core, name)) if not member.startswith("_")}
        for base in getattr(_core, name).__bases__:
            if base.__module__ == "fovea._core":
                own |= {member for member in vars(base) if not member.startswith("_") and member in inside}
        public = {member for member in inside if not member.startswith("_")}
        assert public == own, name
        special = {member for member in inside if member.startswith("__")} - COMMON
        assert special <= set(dir(getattr(_core, name))), name


def keywords(signature):
    function = ast.parse(signature + ": ...").body[0]
    arguments = function.args
    return [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs if a.arg != "self"]


def test_stubs_have_the_keywords_of_the_signatures():
    """Compares each signature that a docstring begins with."""
    checked = 0
    for node in ast.parse((FOLDER / "_core.pyi").read_text()).body:
        functions = [(None, node)] if isinstance(node, ast.FunctionDef) else []
        if isinstance(node, ast.ClassDef):
            functions = [(node.name, f) for f in node.body if isinstance(f, ast.FunctionDef)]
        for owner, stub in functions:
            if owner in ONLY_IN_STUBS:
                continue
            scope = getattr(_core, owner) if owner else _core
            text = getattr(getattr(scope, stub.name, None), "__doc__", None) or ""
            first = text.splitlines()[0] if text else ""
            if not first.startswith(stub.name + "(") and not first.startswith("def " + stub.name):
                continue
            signature = first if first.startswith("def ") else "def " + first
            expected = [a.arg for a in stub.args.args + stub.args.kwonlyargs if a.arg != "self"]
            assert keywords(signature) == expected, (owner, stub.name)
            checked += 1
    assert checked > 60


def test_every_public_name_has_a_docstring():
    for name in fovea.__all__:
        value = getattr(fovea, name)
        if name == "__version__" or issubclass(type(value), type(fovea.DType)):
            continue
        assert value.__doc__, name


def test_all_is_what_the_package_imports():
    own = {name for name in vars(fovea) if not name.startswith("_") and name not in ("torch", "compat", "transformers")}
    assert own | {"__version__"} == set(fovea.__all__)


def test_import_is_quick_and_imports_no_array_library():
    # Time of the process, since the machine may be busy.
    code = (
        "import time, sys; t = time.process_time(); import fovea; print(time.process_time() - t); print(*sys.modules)"
    )
    best = 1e9
    for _ in range(5):
        seconds, modules = python("-c", code).stdout.splitlines()
        best = min(best, float(seconds))
        assert not {"numpy", "torch", "jax", "cupy"} & set(modules.split())
    assert best <= 0.150, f"{best} s"


def test_the_module_links_the_system_libraries_alone():
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not here")
    run = subprocess.run(["readelf", "-d", _core.__file__], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", run.stdout))
    assert needed <= {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
    symbols = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True).stdout
    exported = {line.split()[-1] for line in symbols.splitlines() if " T " in line}
    assert exported == {"PyInit__core"}


def test_command_line_tool():
    run = python("-m", "fovea", "--version")
    assert (run.returncode, run.stdout) == (0, f"fovea {fovea.__version__}\n")
    run = python("-m", "fovea", "generate")
    assert run.returncode == 2 and run.stderr.startswith("fovea: ")
    assert "reference" in python("-m", "fovea", "backends").stdout


def test_kernel_pack_next_to_the_module(tmp_path):
    package = tmp_path / "fovea"
    shutil.copytree(FOLDER, package, ignore=shutil.ignore_patterns("kernels.pack", "__pycache__"))
    (package / "kernels.pack").write_text("no pack")
    environment = {k: v for k, v in os.environ.items() if k != "FOVEA_KERNEL_PACK"}
    run = python("-m", "fovea", "env", env={**environment, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert str(package / "kernels.pack") in run.stdout + run.stderr


def test_bench_gives_rows():
    rows = fovea.bench("attention", kv_len=64, batch=1, seconds=0.05, threads=1)
    assert len(rows) == 1 and rows[0]["kv_len"] == 64 and rows[0]["backend"] == "cpu"
    with pytest.raises(fovea.Error, match="--kv-len") as info:
        fovea.bench("attention", kv_len=-1)
    assert info.value.code == "invalid_argument"
