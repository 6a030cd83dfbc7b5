# SPDX-License-Identifier: Apache-2.0
"""Stands in for packages that a serving engine imports and that a test does not call: other GPUs' kernels, structured
output. A package whose __init__.py has these lines is such a one:

    from empty_package import stand_in

    stand_in(__name__)

Every name in it and in its submodules is an empty class, whose methods raise.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from importlib.metadata import PackageNotFoundError


def stand_in(name: str, version: str = "0") -> None:
    """Makes the module of that name, which is being imported, an empty package."""
    module = sys.modules[name]
    module.__class__ = _Module
    module.__path__ = []
    module.__version__ = version
    sys.meta_path.insert(0, _Finder(name))


class _Names(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        members = {"__module__": cls.__module__, "__init__": _refuse}
        return _Names(name, (), members | {"__get_pydantic_core_schema__": classmethod(_schema)})

    def __or__(cls, other: object) -> object:
        return object

    __ror__ = __or__


def _refuse(self: object, *arguments: object, **options: object) -> None:
    raise PackageNotFoundError(f"{type(self).__name__} of {type(self).__module__}: the package was left out")


def _schema(cls: type, source: object, handler: object) -> dict[str, str]:
    """Returns the schema that models of pydantic use for their fields of this type."""
    return {"type": "any"}


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        return getattr(_Names("anything", (), {"__module__": self.__name__}), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of a package."""

    def __init__(self, package: str):
        self._package = package

    def find_spec(self, name, path=None, target=None):
        if not name.startswith(f"{self._package}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass
