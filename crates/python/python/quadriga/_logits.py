"""Calls logits processors. The native part imports this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Union

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ._quadriga import Floats

#: Takes the tokens so far and the logits of the next one. It changes the logits in place, or returns others.
LogitsProcessor = Callable[[npt.NDArray[np.int32], npt.NDArray[np.float32]], Union[npt.NDArray[np.float32], None]]


def apply(processors: Sequence[LogitsProcessor], tokens: bytes, values: Floats) -> bytes:
    """The bytes of the logits that the processors make of `values`."""
    ids = np.frombuffer(tokens, dtype=np.int32)
    logits: npt.NDArray[np.float32] = np.asarray(values)
    for processor in processors:
        changed = processor(ids, logits)
        if changed is None or changed is logits:
            continue
        changed = np.asarray(changed, dtype=np.float32)
        if changed.shape != logits.shape:
            raise ValueError(f"a logits processor returned the shape {changed.shape}; {logits.shape} is needed")
        logits = changed
    return logits.tobytes()
