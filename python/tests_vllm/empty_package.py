# SPDX-License-Identifier: Apache-2.0
"""Stands in for a package that vLLM imports and that no script for a GPU calls (pack_for_gpu.py). Every name in it and
in its submodules is an empty class, whose methods raise."""

import importlib.abc
import importlib.machinery
import sys
import types
from importlib.metadata import PackageNotFoundError


class _Names(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        members = {"__module__": __name__, "__init__": _refuse, "__get_pydantic_core_schema__": classmethod(_schema)}
        return _Names(name, (), members)

    def __or__(cls, other: object) -> object:
        return object

    __ror__ = __or__


def _refuse(self: object, *arguments: object, **options: object) -> None:
    raise PackageNotFoundError(f"{type(self).__name__} of {__name__}: the package was left out")


def _schema(cls: type, source: object, handler: object) -> dict[str, str]:
    """Returns the schema that models of pydantic use for their fields of this type."""
    return {"type": "any"}


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        return getattr(_Names("anything", (), {}), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


__path__: list[str] = []
__version__ = "0"
sys.modules[__name__].__class__ = _Module
sys.meta_path.insert(0, _Finder())
