"""What SGLang imports although a CPU has no use for it, in the environment of the tests of real SGLang only.

`sgl_kernel` becomes a package of which every function raises when it is called: a test that gets an answer got it
without. torchvision comes as a build for another torch and cannot load its operators; it registers fakes for two of
them when it is imported, so these are declared before. SGLang's code for adapters asks for page-locked memory, which
torch 2.13 refuses to give where there is no accelerator: it gets plain memory.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
import types

_STUB = "sgl_kernel"
_OPERATORS = tuple(
    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
)
_ADAPTERS = "sglang.srt.lora.layers"
_MAKERS = ("tensor", "empty", "zeros", "arange")
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
        if name == _ADAPTERS:
            _lock_no_pages()
        if name == _STUB or name.startswith(f"{_STUB}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Missing(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def _lock_no_pages():
    """Have torch give plain memory where it is asked for page-locked memory."""
    import torch

    for name in _MAKERS:
        setattr(torch, name, _plain(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_args: tensor


def _plain(make):
    @functools.wraps(make)
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


sys.meta_path.insert(0, _Finder())
