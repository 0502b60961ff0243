"""What happens in a forked child."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

__all__ = ["in_a_forked_child"]


def in_a_forked_child(action: Callable[[], object]) -> str:
    """What the action raises in a child, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)  # one that waits for ever is killed
        text = "nothing"
        try:
            action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child was killed: it waited for ever"
    return text
