"""The end of the interpreter, and forks: what must be done for models that are open then."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol

from ._quadriga import forget_threads, refuse, set_main_thread, settle

__all__ = ["open_models"]


class _Closable(Protocol):
    def close(self) -> None: ...


#: The models that are open. They are closed before the interpreter shuts down.
open_models: weakref.WeakSet[_Closable] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends what threads still do with this package, so that none of them meets an interpreter that is gone."""
    refuse()
    for model in list(open_models):
        model.close()
    settle(5.0)


def _in_fork() -> None:
    forget_threads()
    set_main_thread(threading.get_ident())


os.register_at_fork(after_in_child=_in_fork)
set_main_thread(threading.main_thread().ident or 0)
