# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of testdata, as folders that serving engines load."""

from pathlib import Path

MODELS = Path(__file__).parents[2] / "testdata" / "models"


def model_folder(name: str, scratch: Path) -> Path:
    """Returns a folder with a checkpoint of testdata, without the reference tensors, which are no weights."""
    folder = scratch / name
    if not folder.exists():
        folder.mkdir()
        for file in (MODELS / name).iterdir():
            if not file.name.startswith("reference"):
                (folder / file.name).symlink_to(file)
    return folder
