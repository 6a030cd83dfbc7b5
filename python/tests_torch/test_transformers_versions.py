# SPDX-License-Identifier: Apache-2.0
"""The sources of transformers that the adapters rely on, read from wheels of several versions."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import fovea  # noqa: E402
from fovea.transformers import versions  # noqa: E402
from fovea.transformers.contract import Sources, differences  # noqa: E402

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fovea"
SUPPORTED = {"5.17.0": "5.17", "5.19.0": "5.19 to 5.23", "5.23.0": "5.19 to 5.23", "5.24.0": "5.24"}


def wheel(version: str) -> Path:
    """Returns the wheel of a version, downloaded when it is first needed."""
    path = CACHE / "wheels" / f"transformers-{version}-py3-none-any.whl"
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(path.parent)]
        subprocess.run([*command, f"transformers=={version}"], check=True)
    return path


def changed_wheel(folder: Path, version: str, file: str, old: str, new: str) -> Path:
    """Returns a wheel whose file has `new` instead of `old`, with the files that the contracts name."""
    names = {clause.file for adapter in versions.ADAPTERS for clause in adapter.CONTRACT}
    names |= {"modeling_utils.py", "modeling_flash_attention_utils.py", "masking_utils.py"}
    path = folder / "transformers-changed.whl"
    with zipfile.ZipFile(wheel(version)) as source, zipfile.ZipFile(path, "w") as target:
        for name in names & {each.removeprefix("transformers/") for each in source.namelist()}:
            text = source.read(f"transformers/{name}").decode()
            assert name != file or old in text
            target.writestr(f"transformers/{name}", text.replace(old, new) if name == file else text)
    return path


@pytest.mark.parametrize("version", SUPPORTED)
def test_supported_versions_keep_the_contract_of_their_adapter(version):
    adapter = versions.adapter_for(version, wheel(version))
    assert versions.label(adapter) == SUPPORTED[version]
    assert differences(Sources(wheel(version)), adapter.CONTRACT) == []


@pytest.mark.parametrize(("version", "label"), [("5.17.0", "5.24"), ("5.23.0", "5.24"), ("5.24.0", "5.17")])
def test_contracts_of_other_versions_differ(version, label):
    adapter = next(each for each in versions.ADAPTERS if versions.label(each) == label)
    assert differences(Sources(wheel(version)), adapter.CONTRACT)


def test_newer_version_names_what_changed(tmp_path):
    changed = changed_wheel(
        tmp_path,
        "5.24.0",
        "generation/continuous_batching/cache.py",
        "        kwargs: dict[str, Any],  # updated",
        "        extra: dict[str, Any],  # updated",
    )
    with pytest.raises(fovea.Error) as raised:
        versions.adapter_for("5.25.0", changed)
    assert "transformers is 5.25.0; Fovea supports 5.17, 5.19 to 5.23, 5.24" in str(raised.value)
    assert "PagedAttentionCache.update(self, key_states, value_states, layer_idx, extra)" in str(raised.value)


def test_newer_version_without_a_known_change_is_refused():
    with pytest.raises(fovea.Error, match="none in what Fovea relies on"):
        versions.adapter_for("5.25.0.dev0", wheel("5.24.0"))


def test_supported_version_with_another_source_is_refused(tmp_path):
    changed = changed_wheel(
        tmp_path,
        "5.17.0",
        "generation/continuous_batching/input_outputs.py",
        "    block_table: torch.Tensor | None",
        "    pages: torch.Tensor | None",
    )
    with pytest.raises(fovea.Error, match="PagedAttentionArgs has no block_table"):
        versions.adapter_for("5.17.0", changed)


def test_version_between_the_adapters_is_refused():
    """5.18 has the cache of 5.19 and the names of 5.17."""
    with pytest.raises(fovea.Error, match="transformers is 5.18.0; Fovea supports 5.17, 5.19 to 5.23, 5.24"):
        versions.adapter_for("5.18.0", wheel("5.19.0"))


def test_older_version_is_refused():
    with pytest.raises(fovea.Error, match="transformers is 5.16.1, the oldest supported version is 5.17"):
        versions.adapter_for("5.16.1", wheel("5.17.0"))


@pytest.mark.parametrize("version", ["5.19.0", "5.23.0", "5.24.0"])
@pytest.mark.skipif("FOVEA_ALL_TRANSFORMERS" not in os.environ, reason="set FOVEA_ALL_TRANSFORMERS=1: takes minutes")
def test_batching_and_forward_passes_of_other_versions(version):
    """Runs the tests of this folder with another version, unpacked next to the installed one."""
    target = CACHE / f"transformers-{version}"
    if not (target / "transformers" / "__init__.py").exists():
        with zipfile.ZipFile(wheel(version)) as packed:
            packed.extractall(target)
    paths = [str(target), *(each for each in sys.path if each)]
    tests = [str(Path(__file__).parent / f"test_transformers_{each}.py") for each in ("batching", "forward")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *tests], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-4000:]
