# SPDX-License-Identifier: Apache-2.0
"""The parts of transformers' source that the adapters rely on, and how to compare them with a release.

Sources are parsed, never imported, so a wheel that is not installed can be checked too.
"""

import ast
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Sources:
    """The files of a transformers release: the folder of the package, or a wheel."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._wheel = zipfile.ZipFile(self._path) if self._path.suffix == ".whl" else None
        self._trees: dict[str, ast.Module] = {}

    def text(self, file: str) -> str | None:
        """Returns a file of the package, None if the release lacks it."""
        try:
            if self._wheel is not None:
                return self._wheel.read(f"transformers/{file}").decode()
            return (self._path / file).read_text()
        except (KeyError, FileNotFoundError):
            return None

    def find(self, file: str, name: str) -> ast.AST | None:
        """Returns the class or function of this dotted name, None if there is none."""
        if file not in self._trees:
            self._trees[file] = ast.parse(self.text(file) or "")
        node: ast.AST | None = self._trees[file]
        for part in name.split("."):
            node = next((child for child in node.body if getattr(child, "name", None) == part), None)
            if node is None:
                return None
        return node


class Clause(Protocol):
    """One thing that an adapter relies on."""

    def difference(self, sources: Sources) -> str | None:
        """Returns what the release has instead, None if the clause holds."""


@dataclass(frozen=True)
class Signature:
    """A function has these parameters first, in this order. Further ones are allowed."""

    file: str
    name: str
    parameters: str

    def difference(self, sources: Sources) -> str | None:
        node = sources.find(self.file, self.name)
        if not isinstance(node, ast.FunctionDef):
            return f"{self.file}: there is no function {self.name}"
        arguments = node.args
        found = [each.arg for each in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
        expected = self.parameters.split(", ")
        if found[: len(expected)] == expected:
            return None
        return f"{self.file}: {self.name}({', '.join(found)}), expected ({self.parameters})"


@dataclass(frozen=True)
class Attributes:
    """Methods of a class assign these attributes of self, or its body declares them."""

    file: str
    name: str
    attributes: str

    def difference(self, sources: Sources) -> str | None:
        node = sources.find(self.file, self.name)
        if not isinstance(node, ast.ClassDef):
            return f"{self.file}: there is no class {self.name}"
        found = {
            each.attr
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id == "self"
        }
        found |= _declared(node)
        missing = [each for each in self.attributes.split(", ") if each not in found]
        return f"{self.file}: {self.name} has no {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Fields:
    """The body of a class (a TypedDict) declares these fields."""

    file: str
    name: str
    fields: str

    def difference(self, sources: Sources) -> str | None:
        node = sources.find(self.file, self.name)
        if not isinstance(node, ast.ClassDef):
            return f"{self.file}: there is no class {self.name}"
        missing = [each for each in self.fields.split(", ") if each not in _declared(node)]
        return f"{self.file}: {self.name} has no {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Text:
    """A file contains this text."""

    file: str
    text: str

    def difference(self, sources: Sources) -> str | None:
        text = sources.text(self.file)
        if text is None:
            return f"there is no file {self.file}"
        return None if self.text in text else f"{self.file}: does not contain: {self.text}"


COMMON = (
    Signature(
        "modeling_utils.py",
        "PreTrainedModel._check_and_adjust_attn_implementation",
        "self, attn_implementation, is_init_check, allow_all_kernels",
    ),
    Signature(
        "modeling_flash_attention_utils.py", "_lazy_imports", "implementation, attention_wrapper, allow_all_kernels"
    ),
    Signature(
        "masking_utils.py",
        "flash_attention_mask",
        "batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask",
    ),
    Text("masking_utils.py", "use_vmap=use_vmap,"),
    Text("modeling_utils.py", "ALL_ATTENTION_FUNCTIONS: AttentionInterface = AttentionInterface()"),
    Text("masking_utils.py", "ALL_MASK_ATTENTION_FUNCTIONS: AttentionMaskInterface = AttentionMaskInterface()"),
)
"""The parts of transformers that every adapter relies on."""


def differences(sources: Sources, clauses: tuple[Clause, ...]) -> list[str]:
    """Returns how a release differs from COMMON and the clauses of an adapter, one line each."""
    found = (clause.difference(sources) for clause in COMMON + clauses)
    return [each for each in found if each is not None]


def _declared(node: ast.ClassDef) -> set[str]:
    names = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in node.body:
        if isinstance(each, ast.Assign):
            names |= {target.id for target in each.targets if isinstance(target, ast.Name)}
    return names
