# SPDX-License-Identifier: Apache-2.0
"""The signatures that the plug-in relies on are those of the supported versions of vLLM. No vLLM is imported."""

import ast
import json
from pathlib import Path

import pytest
from signatures import read_contract
from wheel_contract import CACHE, check_arguments, differences, find_method, missing_imports

HERE = Path(__file__).parent
PLUGIN = HERE.parent / "fovea" / "vllm"
# tools/wheel_sources.sh vllm puts them there.
SOURCES = CACHE / "vllm-sources"
VERSIONS = sorted(path.stem for path in (HERE / "contract").glob("*.json"))


def _contract(version: str) -> dict[str, list[str] | None]:
    return json.loads((HERE / "contract" / f"{version}.json").read_text())


@pytest.mark.parametrize("version", VERSIONS)
def test_supported_versions(version):
    folder = SOURCES / version
    if not folder.exists():
        pytest.skip(f"{folder} is missing: tools/wheel_sources.sh vllm {version}")
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
        pytest.skip(f"{folder} is missing: tools/wheel_sources.sh vllm {version}")
    others = {f"v{other.rsplit('.', 1)[0].replace('.', '_')}.py" for other in VERSIONS if other != version}
    missing = missing_imports(PLUGIN, folder, "vllm", others)
    assert missing == []


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
    file, name = ours
    check_arguments(find_method(PLUGIN / file, name).args, expected, f"vLLM {version}")


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
