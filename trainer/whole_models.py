"""Has transformers refuse a model directory that lacks a tensor, which it draws at random and only warns of.

Names of files are not compared with names of parameters: transformers renames some, and knows which are tied.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def whole_models(*, new: str = "") -> Iterator[None]:
    """Have `from_pretrained` raise OSError, as for a missing file, if a tensor is missing or has another shape.

    Other libraries load the model that a job trains, so what they call is replaced meanwhile. Tensors whose names
    begin with `new` may be missing.
    """
    import transformers  # noqa: PLC0415 - takes seconds

    models: Any = transformers.PreTrainedModel
    theirs = vars(models)["from_pretrained"]

    def load(cls: type, pretrained_model_name_or_path: Any, *args: Any, **options: Any) -> Any:
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # so that we say which
        model, info = theirs.__func__(cls, pretrained_model_name_or_path, *args, **options)
        for problem in _problems(info, new):
            raise OSError(problem)
        return model

    models.from_pretrained = classmethod(load)
    try:
        yield
    finally:
        models.from_pretrained = theirs


def _problems(info: Mapping[str, Any], new: str) -> Iterator[str]:
    for name in sorted(info["missing_keys"]):
        if not new or not name.startswith(new):
            yield f"it has no tensor {name}"
    for key in sorted(info["mismatched_keys"]):
        name = key if isinstance(key, str) else key[0]  # transformers 5 has both shapes behind it
        yield f"its tensor {name} has another shape than the model's"
