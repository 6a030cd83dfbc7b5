# SPDX-License-Identifier: Apache-2.0
"""The examples of the documents run."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SNIPPETS = [
    (name, number, text)
    for name in ("README.md", "docs/python.md")
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL))
]


@pytest.mark.parametrize("name, number, text", SNIPPETS, ids=[f"{name}-{number}" for name, number, _ in SNIPPETS])
def test_snippet(name, number, text, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names = {}
    exec(text, names)
    if "engine" in names:
        assert len(capsys.readouterr().out) > 20
    else:
        # 19 keys of zeros score 0, the new key scores 8, as in examples/hello_attention.cc.
        assert 0.9936 < names["out"][0, 0, 0] < 0.9937
