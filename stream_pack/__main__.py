"""The program: ``python -m stream_pack``, and what the script ``stream-pack`` calls."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["script"]


def script(*, prog: str = "stream-pack") -> int:
    """Run the command of this process's arguments, and return its exit code.

    A signal to stop that comes while modules are imported ends the process, as quietly and with the code that
    :func:`stream_pack.cli.main` returns for one that comes later: nothing has to be cleaned up yet.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            signal.signal(signum, _leave)
    from stream_pack.cli import main

    return main(prog=prog)


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)


if __name__ == "__main__":
    sys.exit(script(prog="python -m stream_pack"))
