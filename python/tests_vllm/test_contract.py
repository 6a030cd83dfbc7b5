# SPDX-License-Identifier: Apache-2.0
"""The signatures that the plug-in relies on are those of the supported versions of vLLM. No vLLM is imported."""

import ast
import json
import os
from pathlib import Path

import pytest
from signatures import differences, read_contract

HERE = Path(__file__).parent
PLUGIN = HERE.parent / "fovea" / "vllm"
# tools/vllm_sources.sh puts them there.
SOURCES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fovea" / "vllm-sources"
VERSIONS = sorted(path.stem for path in (HERE / "contract").glob("*.json"))


def _contract(version: str) -> dict[str, list[str] | None]:
    return json.loads((HERE / "contract" / f"{version}.json").read_text())


@pytest.mark.parametrize("version", VERSIONS)
def test_supported_versions(version):
    folder = SOURCES / version
    if not folder.exists():
        pytest.skip(f"{folder} is missing: tools/vllm_sources.sh {version}")
    assert differences(_contract(version), read_contract(folder)) == []


def test_further_versions():
    """Names changes of versions whose sources are next to the supported ones: read a release before you use it."""
    newest = _contract(max(VERSIONS, key=lambda version: tuple(map(int, version.split(".")))))
    changes = []
    for folder in sorted(SOURCES.glob("*")) if SOURCES.exists() else []:
        if folder.name not in VERSIONS:
            changes += [f"{folder.name}: {line}" for line in differences(newest, read_contract(folder))]
    assert changes == []


@pytest.mark.parametrize("version", VERSIONS)
def test_imports_exist(version):
    """The names that the plug-in and its tests import from vLLM are in the modules of each version."""
    folder = SOURCES / version
    if not folder.exists():
        pytest.skip(f"{folder} is missing: tools/vllm_sources.sh {version}")
    others = {f"v{other.rsplit('.', 1)[0].replace('.', '_')}.py" for other in VERSIONS if other != version}
    missing = []
    for file in sorted(PLUGIN.glob("*.py")):
        if file.name in others:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                known = _names(folder, node.module)
                missing += [f"{file.name}: {node.module}.{item.name}" for item in node.names if item.name not in known]
    assert missing == []


def _names(folder: Path, module: str) -> set[str]:
    """Returns what a module defines or imports at its top level, and its submodules."""
    path = folder.joinpath(*module.split("."))
    names = {item.stem for item in path.glob("*")} if path.is_dir() else set()
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {item.asname or item.name for item in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


# The plug-in's functions that vLLM calls, and the functions of vLLM whose arguments they get.
_CALLED = {
    ("mha.py", "MhaImpl.forward"): "AttentionImpl.forward",
    ("mha.py", "MhaImpl.__init__"): "AttentionImpl.__init__",
    ("mla.py", "MlaImpl.forward_mha"): "MLAAttentionImpl.forward_mha",
    ("mla.py", "MlaImpl.forward_mqa"): "MLAAttentionImpl.forward_mqa",
    ("mla.py", "MlaImpl.do_kv_cache_update"): "MLAAttentionImpl.do_kv_cache_update",
    ("mla.py", "MlaImpl.__init__"): "MLAAttentionImpl.__init__",
    ("metadata.py", "MetadataBuilder.__init__"): "AttentionMetadataBuilder.__init__",
    ("metadata.py", "MetadataBuilder.build"): "AttentionMetadataBuilder.build",
    ("metadata.py", "MetadataBuilder.update_block_table"): "AttentionMetadataBuilder.update_block_table",
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ours", _CALLED, ids=lambda pair: pair[1])
def test_functions_take_what_vllm_gives(version, ours):
    expected = _contract(version)[f"vllm/v1/attention/backend.py: {_CALLED[ours]}"]
    arguments = _function(*ours).args
    named = [item.arg for item in [*arguments.posonlyargs, *arguments.args]]
    for index, parameter in enumerate(expected):
        name = parameter.rstrip("=")
        if index < len(named):
            assert named[index] == name, f"argument {index} is {named[index]}, vLLM {version} gives {name}"
        else:
            assert arguments.kwarg, f"vLLM {version} gives {name}"
    required = len(named) - len(arguments.defaults)
    assert required <= len(expected)


def _function(file: str, name: str) -> ast.FunctionDef:
    cls, function = name.split(".")
    tree = ast.parse((PLUGIN / file).read_text())
    node = next(item for item in tree.body if isinstance(item, ast.ClassDef) and item.name == cls)
    return next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == function)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_option_of_the_selector_is_known(version):
    """An option that the plug-in does not know would only be refused when a user sets it."""
    tree = ast.parse((PLUGIN / "validation.py").read_text())
    known: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id in ("_KNOWN", "_REFUSED"):
            items = node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts
            known |= {item.value for item in items}
    fields = set(_contract(version)["vllm/v1/attention/selector.py: AttentionSelectorConfig"])
    assert fields <= known, f"vLLM {version} also has {sorted(fields - known)}"
