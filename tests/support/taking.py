"""Taking all that a source holds, as a conversion without a selection does: what cannot be packed is then an error."""

from __future__ import annotations

from typing import TypeVar

from stream_pack.pipeline.source import Source

__all__ = ["taken"]

_S = TypeVar("_S", bound=Source)


def taken(source: _S) -> _S:
    """``source``, all of which can be packed; else the error of what cannot, and it is closed."""
    try:
        source.refuse(range(len(source.catalog)))
    except BaseException:
        source.close()
        raise
    return source
