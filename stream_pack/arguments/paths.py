"""Checks of what a caller passes as a path, before anything is opened."""

from __future__ import annotations

import os
import re
import shlex
from typing import Literal, TypeAlias

from stream_pack.errors import OptionError
from stream_pack.text import quoted, shown

__all__ = ["PathUse", "require_path"]

PathUse: TypeAlias = Literal["source", "target", "file", "folder"]
"""What is done with a path: ``"source"``, ``"target"``: one pass of reading or writing, which a pipe can replace;
``"file"``: random access to a local file; ``"folder"``: files are made in it."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*):/(/*)(.*)", re.IGNORECASE | re.DOTALL)

# What prints a URL, and what sends its input to one, by scheme.
_FETCH = {
    **dict.fromkeys(("http", "https", "ftp", "ftps"), "curl -fL {}"),
    "s3": "aws s3 cp {} -",
    "gs": "gsutil cat {}",
}
_SEND = {
    **dict.fromkeys(("http", "https", "ftp", "ftps"), "curl -fT - {}"),
    "s3": "aws s3 cp - {}",
    "gs": "gsutil cp - {}",
}
_KNOWN = frozenset({*_FETCH, "hf", "file"})
MAX_URL = 200
"""Characters of a URL that a command in a message holds; signed ones have a thousand."""


def require_path(name: str, path: object, use: PathUse) -> None:
    """Raises: OptionError for the argument ``name`` if it is no path, an empty one, one that no file system can have,
    or a URL; what can be typed instead is in the message."""
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"{name}={shown(path)}: expected a path")
    text = os.fsdecode(path)
    if not text:
        raise OptionError(f"{name} is empty: expected a path")
    if "\0" in text or not _encodable(text):
        raise OptionError(f"{name}={quoted(text)}: no path can hold these characters")
    match = _URL.match(text)
    if match is None or _is_there(text, use):
        return
    scheme, slashes, rest = match[1].lower(), match[2], match[3]
    if slashes or scheme in _KNOWN:  # one slash: what pathlib makes of two
        raise OptionError(f"{name} is a URL, not a path: {_advice(scheme, rest, use)}")


def _encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _is_there(path: str, use: PathUse) -> bool:
    """A folder may be called ``s3:``."""
    return os.path.lexists(path) or (use == "target" and os.path.isdir(os.path.dirname(path)))


def _advice(scheme: str, rest: str, use: PathUse) -> str:
    if scheme == "file":
        from urllib.parse import unquote

        return f"pass {quoted(unquote('/' + rest.removeprefix('localhost').lstrip('/')))}"
    if use == "folder":
        return "pass that of a local folder"
    if use == "target":
        return _how_to_send(scheme, rest)
    if scheme == "hf" and _on_hub(rest) is None:
        return "fetch it with `hf download OWNER/NAME`, and pass the folder that it prints"
    pipe = f"`{_fetching(scheme, rest)} | stream-pack convert - x.pack`"
    if use == "source":
        return f"pipe it in, {pipe}"
    return f"make it a local file first, {pipe}"


def _how_to_send(scheme: str, rest: str) -> str:
    if scheme == "hf":
        return "write a file, and send it with `hf upload OWNER/NAME FILE`"
    send = _SEND.get(scheme, "PROGRAM-THAT-SENDS-IT-TO {}").format(_typed(f"{scheme}://{rest}"))
    return f"pipe it there, `stream-pack convert SOURCE - | {send}`"


def _fetching(scheme: str, rest: str) -> str:
    """The command that prints what is at a URL."""
    if scheme == "hf":
        scheme, rest = "https", f"huggingface.co/{_on_hub(rest)}"
    elif rest.startswith("huggingface.co/"):
        rest = rest.replace("/blob/", "/resolve/", 1)  # the page about a file
    return _FETCH.get(scheme, "PROGRAM-THAT-FETCHES {}").format(_typed(f"{scheme}://{rest}"))


def _on_hub(rest: str) -> str | None:
    """The path of ``hf://[datasets/]OWNER/NAME[@REVISION]/FILE`` on the hub's web server; None for a repository."""
    match = re.fullmatch(r"((?:datasets/|spaces/)?[^/]+/[^/@]+)(?:@([^/]+))?/+(.+)", rest)
    return f"{match[1]}/resolve/{match[2] or 'main'}/{match[3]}" if match else None


def _typed(url: str) -> str:
    """``url`` as it is typed in a shell, or a word for one that is too long to show, or to print."""
    return shlex.quote(url) if len(url) <= MAX_URL and url.isprintable() else "URL"
