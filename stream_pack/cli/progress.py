"""The progress bar: bytes done, rate, time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TextIO, TypeAlias

from stream_pack.text import human_nbytes

__all__ = ["Progress", "progress_bar"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""

UPDATE_SECONDS = 0.1
"""Ten updates a second look smooth and cost nothing."""


@contextmanager
def progress_bar(*, wanted: bool) -> Iterator[Progress | None]:
    """A bar on stderr while the block runs, erased at its end; None if stderr is no terminal.

    tqdm draws it if it is installed; otherwise it is a plain line.
    """
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        with closing(PlainBar(sys.stderr, clock=time.monotonic)) as plain:
            yield plain.update
        return
    began = time.monotonic()
    with tqdm(
        total=0,
        bar_format="{percentage:3.0f} %|{bar}|{desc}",  # its own units are not those of the rest of the output
        mininterval=UPDATE_SECONDS,
        leave=False,
        file=sys.stderr,
        dynamic_ncols=True,
    ) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            _, _, amounts = progress_line(done, total, seconds=time.monotonic() - began).partition("%")
            bar.set_description_str(amounts, refresh=False)
            bar.update(done - bar.n)

        yield update


class PlainBar:
    """One line that is overwritten at most ten times a second."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._began = self._shown_at = clock()
        self._width = 0

    def update(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes are done, unless the line was updated just now."""
        now = self._clock()
        if now - self._shown_at < UPDATE_SECONDS:
            return
        self._shown_at = now
        self._show(progress_line(done, total, seconds=now - self._began))

    def close(self) -> None:
        """Erase the line."""
        self._show("")
        self._stream.write("\r")
        self._stream.flush()

    def _show(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)


def progress_line(done: int, total: int, *, seconds: float) -> str:
    """``"45 %  1.20 GiB of 2.67 GiB  812 MiB/s  0:01 left"``"""
    percent = 100 * done // total if total else 100
    line = f"{percent} %  {human_nbytes(done)} of {human_nbytes(total)}"
    if done and seconds > 0:
        rate = done / seconds
        minutes, left = divmod(round((total - done) / rate), 60)
        line += f"  {human_nbytes(rate)}/s  {minutes}:{left:02d} left"
    return line
