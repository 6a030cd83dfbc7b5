# SPDX-License-Identifier: Apache-2.0
"""The signatures that the plug-in relies on are those of the supported versions of SGLang. No SGLang is imported."""

import ast
import json
import tomllib
from pathlib import Path

import pytest
from signatures import read_contract
from wheel_contract import CACHE, check_arguments, differences, find_method, missing_imports

HERE = Path(__file__).parent
PLUGIN = HERE.parent / "fovea" / "sglang"
PYPROJECT = HERE.parents[1] / "pyproject.toml"
# tools/wheel_sources.sh sglang puts them there.
SOURCES = CACHE / "sglang-sources"
VERSIONS = sorted(path.stem for path in (HERE / "contract").glob("*.json"))


def _contract(version: str) -> dict[str, list[str] | None]:
    return json.loads((HERE / "contract" / f"{version}.json").read_text())


def _sources(version: str) -> Path:
    folder = SOURCES / version
    if not folder.exists():
        pytest.skip(f"{folder} is missing: tools/wheel_sources.sh sglang {version}")
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_supported_versions(version):
    assert differences(_contract(version), read_contract(_sources(version))) == []


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
    """The names that the plug-in imports from SGLang are in the modules of each version."""
    others = {f"v{other.replace('.', '_')}.py" for other in VERSIONS if other != version}
    assert missing_imports(PLUGIN, _sources(version), "sglang", others) == []


# The plug-in's functions that SGLang calls, and the functions of SGLang whose arguments they get.
_BACKEND = "sglang/srt/layers/attention/base_attn_backend.py: AttentionBackend"
_CALLED = {
    ("backend.py", "FoveaBackend.init_forward_metadata"): f"{_BACKEND}.init_forward_metadata",
    ("backend.py", "FoveaBackend.init_forward_metadata_out_graph"): f"{_BACKEND}.init_forward_metadata_out_graph",
    ("backend.py", "FoveaBackend.init_forward_metadata_in_graph"): f"{_BACKEND}.init_forward_metadata_in_graph",
    ("backend.py", "FoveaBackend.init_cuda_graph_state"): f"{_BACKEND}.init_cuda_graph_state",
    ("backend.py", "FoveaBackend.update_verify_buffers_to_fill_after_draft"): (
        f"{_BACKEND}.update_verify_buffers_to_fill_after_draft"
    ),
    ("backend.py", "FoveaBackend._attend"): f"{_BACKEND}.forward_extend",
    ("draft.py", "DraftSteps.init_forward_metadata"): f"{_BACKEND}.init_forward_metadata",
    ("draft.py", "DraftSteps.init_forward_metadata_out_graph"): f"{_BACKEND}.init_forward_metadata_out_graph",
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("ours", _CALLED, ids=lambda pair: pair[1])
def test_functions_take_what_sglang_gives(version, ours):
    file, name = ours
    check_arguments(find_method(PLUGIN / file, name).args, _contract(version)[_CALLED[ours]], f"SGLang {version}")


@pytest.mark.parametrize("version", VERSIONS)
def test_maps_of_draft_backends_are_told_apart_by_triton(version):
    """The plug-in knows which map it gets from the function of the entry "triton"."""
    tree = ast.parse((_sources(version) / "sglang/srt/speculative/draft_utils.py").read_text())
    entries = [
        value.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "triton"
    ]
    assert sorted(entries) == ["_create_triton_decode_backend", "_create_triton_prefill_backend"]


@pytest.mark.parametrize("version", VERSIONS)
def test_lists_of_choices_can_be_extended(version):
    text = (_sources(version) / "sglang/srt/server_args.py").read_text()
    kinds = ["attention", "deterministic_attention", "radix_supported_deterministic_attention"]
    for kind in kinds + (["draft_attention"] if version != "0.5.17" else []):
        assert f"add_{kind}_backend_choices" in text


def test_package_names_the_entry_point():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"fovea": "fovea.sglang.plugin:register"}
