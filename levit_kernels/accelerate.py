"""accelerate: hands a reference model over to the kernels, by a method of its own."""

from __future__ import annotations

from typing import TypeVar

Model = TypeVar("Model")


def accelerate(model: Model) -> Model:
    """Makes a model compute through the kernels, in place, and returns it.

    The model does the work in `__accelerate__()`; parameters keep their identity, so optimizers stay valid.

    Raises:
        TypeError: the model has no such method.
    """
    method = getattr(type(model), "__accelerate__", None)
    if method is None:
        raise TypeError(
            f"accelerate: model must have a method __accelerate__(), as levit.reference.LEViT has; "
            f"{type(model).__name__} has none"
        )
    method(model)
    return model
