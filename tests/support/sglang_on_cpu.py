"""What SGLang imports although a CPU has no use for it, in the environment of the tests of real SGLang only.

`sgl_kernel` becomes a package of which every function raises when it is called: a test that gets an answer got it
without. torchvision comes as a build for another torch and cannot load its operators; it registers fakes for two of
them when it is imported, so these are declared before.
"""

import importlib.abc
import importlib.machinery
import sys
import types

_STUB = "sgl_kernel"
_OPERATORS = tuple(
    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
)
_declared = []


class _Absent:
    """A name of the package: it may be imported and looked into, never called."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *_args, **_kwargs):
        raise NotImplementedError(f"{self._name} needs an accelerator")


class _Missing(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not _declared:
            import torch

            _declared.append(torch.library.Library("torchvision", "DEF"))
            for operator in _OPERATORS:
                _declared[0].define(operator)
        if name == _STUB or name.startswith(f"{_STUB}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Missing(spec.name)

    def exec_module(self, module):
        module.__path__ = []


sys.meta_path.insert(0, _Finder())
