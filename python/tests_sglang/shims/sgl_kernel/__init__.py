# SPDX-License-Identifier: Apache-2.0
"""Stands in for SGLang's CUDA kernels, whose wheel does not load without a GPU. SGLang imports their names; on a CPU it
calls none of them."""

import importlib.abc
import importlib.machinery
import sys
import types


class _Missing:
    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, *arguments: object, **options: object) -> None:
        raise RuntimeError(f"{self.__name__} needs a GPU")

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


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
__version__ = "0.4.5"
sys.modules[__name__].__class__ = _Module
sys.meta_path.insert(0, _Finder())
