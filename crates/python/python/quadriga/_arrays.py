"""Arrays, numbers and shapes that callers give, checked."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import GraphError

__all__ = ["as_array", "as_bound", "as_converted", "as_count", "as_dims", "as_number", "as_parameter"]

#: The types that numpy has, by their names here.
_NUMPY: dict[str, type[np.generic]] = {
    "f32": np.float32,
    "f16": np.float16,
    "f64": np.float64,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
}

#: A float64 that is infinite as float32.
_BEYOND_F32 = 1e300


def as_array(values: Any) -> npt.NDArray[Any]:
    """A contiguous numpy array, without a copy where that is possible."""
    is_foreign = hasattr(values, "__dlpack__") and not hasattr(values, "__array_interface__")
    # Unlike `ascontiguousarray`, this keeps a scalar a scalar.
    array: npt.NDArray[Any] = np.asarray(np.from_dlpack(values) if is_foreign else values, order="C")
    return array


def as_converted(values: Any, dtype: str) -> npt.NDArray[Any]:
    """As `as_array`; lists and Python's numbers get the type of the tensor."""
    if isinstance(values, (int, float, list, tuple)) and dtype in _NUMPY:
        array: npt.NDArray[Any] = np.asarray(values, dtype=_NUMPY[dtype], order="C")
        return array
    return as_array(values)


def as_number(value: Any) -> float:
    """A Python or numpy number; an array is a constant or an input of a graph, which has a name."""
    if isinstance(value, (int, float, np.integer, np.floating)):
        return float(value)  # pyright: ignore[reportUnknownArgumentType]
    raise TypeError(f"a value of a graph and {type(value).__name__} cannot be combined: use a Value or a number")


def as_count(name: str, value: int) -> int:
    """A number of bytes or threads, checked."""
    count = operator.index(value)
    if not 0 <= count < 1 << 63:
        raise GraphError(f"{name} is {count}; it must be between 0 and 2⁶³")
    return count


def as_dims(name: str, shape: Sequence[int]) -> list[int]:
    """A shape, checked."""
    dims = [operator.index(extent) for extent in shape]
    if any(extent < 0 or extent >= 1 << 63 for extent in dims):
        raise GraphError(f"{name}: the shape {dims} has an extent that is not between 0 and 2⁶³")
    return dims


def as_parameter(name: str, value: Any) -> Any:
    """A parameter of an operation, for JSON."""
    item = getattr(value, "item", None)  # numpy's numbers have it
    plain: Any = value if item is None else item()
    if isinstance(plain, float) and not math.isfinite(plain):
        raise GraphError(f"{name} is {plain}; it must be finite")
    return plain


def as_bound(name: str, value: Any) -> float:
    """A bound of a range, which may be infinite. JSON has no infinity: it stands as a number that is one in float32."""
    bound = as_number(value)
    if math.isnan(bound):
        raise GraphError(f"{name} is not a number")
    return min(max(bound, -_BEYOND_F32), _BEYOND_F32)
