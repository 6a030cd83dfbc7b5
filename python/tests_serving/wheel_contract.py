# SPDX-License-Identifier: Apache-2.0
"""Reads the signatures that a plug-in relies on out of the sources of a package, without importing them."""

import ast
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fovea"

Contract = dict[str, list[str] | None]
"""Names, as "file: Class.method", with their parameters; None: a field or a class without fields of interest."""

Classes = Mapping[str, Mapping[str, tuple[str, ...] | None]]
"""For each file its classes, with their methods and fields of interest; None: all fields with a type."""


def read_contract(source: Path, classes: Classes, functions: Mapping[str, tuple[str, ...]]) -> Contract:
    """Returns what a wheel or a folder of site-packages has of the names. Missing names are left out."""
    found: Contract = {}
    for file in sorted({*classes, *functions}):
        text = _read(source, file)
        for node in ast.parse(text).body if text is not None else []:
            if isinstance(node, ast.ClassDef) and node.name in classes.get(file, {}):
                _read_class(found, file, node, classes[file][node.name])
            elif isinstance(node, ast.FunctionDef) and node.name in functions.get(file, ()):
                found[f"{file}: {node.name}"] = _parameters(node)
            for target in _assigned(node):
                if target in functions.get(file, ()):
                    found[f"{file}: {target}"] = None
    return found


def differences(old: Contract, new: Contract) -> list[str]:
    """Returns a sentence for each name that is missing, is new or has other parameters."""
    lines = []
    for name in sorted({*old, *new}):
        if name not in new:
            lines.append(f"{name} is gone")
        elif name not in old:
            lines.append(f"{name} is new: {_text(new[name])}")
        elif old[name] != new[name]:
            lines.append(f"{name} was {_text(old[name])}, is {_text(new[name])}")
    return lines


def _text(parameters: list[str] | None) -> str:
    return "a field" if parameters is None else f"({', '.join(parameters)})"


def _read(source: Path, file: str) -> str | None:
    if source.is_dir():
        path = source / file
        return path.read_text(encoding="utf-8") if path.exists() else None
    with zipfile.ZipFile(source) as wheel:
        return wheel.read(file).decode() if file in wheel.namelist() else None


def _read_class(found: Contract, file: str, node: ast.ClassDef, names: tuple[str, ...] | None) -> None:
    label = f"{file}: {node.name}"
    if names is None:
        fields = [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]
        found[label] = fields
        return
    found[label] = None
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name in names:
            found[f"{label}.{item.name}"] = _parameters(item)
        for target in _assigned(item):
            if target in names:
                found[f"{label}.{target}"] = None


def _assigned(item: ast.stmt) -> list[str]:
    targets = item.targets if isinstance(item, ast.Assign) else [item.target] if isinstance(item, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _parameters(node: ast.FunctionDef) -> list[str]:
    """Returns the parameters; "=" marks a default."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    names = [item.arg + ("=" if index >= required else "") for index, item in enumerate(positional)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    names += [item.arg + ("=" if default is not None else "") for item, default in pairs]
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def missing_imports(plugin: Path, folder: Path, package: str, others: set[str]) -> list[str]:
    """Returns the names that the files of a plug-in import from a package and that its sources lack. Files named in
    `others` are for other versions."""
    missing = []
    for file in sorted(plugin.glob("*.py")):
        if file.name in others:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
                known = _names(folder, node.module)
                missing += [f"{file.name}: {node.module}.{item.name}" for item in node.names if item.name not in known]
    return missing


def _names(folder: Path, module: str) -> set[str]:
    """Returns what a module defines or imports at its top level, and its submodules."""
    path = folder.joinpath(*module.split("."))
    names = {item.stem for item in path.glob("*")} if path.is_dir() else set()
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(file.read_text())) if file.exists() else []:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {item.asname or item.name for item in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def find_method(path: Path, name: str) -> ast.FunctionDef:
    """Returns a method, named "Class.method", of a file."""
    cls, function = name.split(".")
    tree = ast.parse(path.read_text())
    node = next(item for item in tree.body if isinstance(item, ast.ClassDef) and item.name == cls)
    return next(item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == function)


def check_arguments(arguments: ast.arguments, expected: list[str], given_by: str) -> None:
    """Checks that a function of a plug-in takes what the function of a package takes whose place it has."""
    named = [item.arg for item in [*arguments.posonlyargs, *arguments.args]]
    for index, parameter in enumerate(expected):
        name = parameter.rstrip("=")
        if index < len(named):
            assert named[index] == name, f"argument {index} is {named[index]}, {given_by} gives {name}"
        else:
            assert arguments.kwarg, f"{given_by} gives {name}"
    required = len(named) - len(arguments.defaults)
    assert required <= len(expected)
