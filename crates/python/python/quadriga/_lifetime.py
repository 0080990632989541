"""The end of the interpreter, and forks: what must be done for models that are open then."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable

from ._quadriga import forget_threads, refuse, set_main_thread, settle

__all__ = ["open_models"]


#: The models that are open, with what begins to close each. That is called before the interpreter shuts down.
open_models: weakref.WeakKeyDictionary[object, Callable[[], None]] = weakref.WeakKeyDictionary()

#: How long the end of the interpreter waits for what threads still do, such as a logits processor, in seconds.
_LONGEST_WAIT = 5.0


@atexit.register
def _close_all() -> None:
    """Ends what threads still do with this package, so that none of them meets an interpreter that is gone."""
    refuse()
    for begin_close in list(open_models.values()):
        begin_close()
    settle(_LONGEST_WAIT)


def _in_fork() -> None:
    forget_threads()
    set_main_thread(threading.get_ident())


os.register_at_fork(after_in_child=_in_fork)
set_main_thread(threading.main_thread().ident or 0)
