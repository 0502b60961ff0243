"""``inspect``: list the tensors of a pack or a checkpoint, and what fills the file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stream_pack.arguments.paths import require_path
from stream_pack.cli.arguments import STANDARD, Command, add_flag, add_offset, add_option, positive
from stream_pack.cli.exits import DAMAGE, DONE, UsageError
from stream_pack.cli.reading import add_keys, key_of, source_of
from stream_pack.cli.terminal import Standard
from stream_pack.text import printable

if TYPE_CHECKING:
    from stream_pack.inspection.inspection import Inspection
    from stream_pack.reader.damage import Damage

__all__ = ["INSPECT"]

IN_PLACE = ("pack", "mps", "xnnpack", "ptd", "pte")
"""The kinds of files that verify reads."""


def _add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a pack, or what convert takes; - reads stdin, only its head")
    add_offset(parser)
    add_flag(parser, "--json", text="print JSON instead of text, also for an error")
    text = "write one page of HTML that needs nothing else: the file to scale, tensors by name and by dtype, a list to "
    text += "search; - writes to stdout"
    add_option(parser, "--html", "OUT", text)
    add_flag(parser, "--verify", text="with --html: verify the pack too, and mark what is damaged")
    add_keys(parser)
    group = parser.add_argument_group("the list of tensors")
    text = "list only tensors whose whole name matches (*, ?, [...]); can be repeated"
    add_option(group, "--include", "GLOB", text, repeated=True)
    text = "the largest first, by name, or as they are in the file (default: as in the source)"
    group.add_argument("--sort", choices=("size", "name", "offset"), help=text)
    add_option(group, "--limit", "N", "list the first N only, and say how many more there are", type=positive)
    text = "on a terminal, names that differ in a number only share a row, layers.{0..31}.wq; list each in its own"
    add_flag(group, "--all", text=text)


def _run(arguments: argparse.Namespace, standard: Standard) -> int:
    if arguments.html is not None:
        return _write_page(arguments, standard)
    if arguments.verify:
        raise UsageError("--verify marks damage in the page of --html; `stream-pack verify` lists it")
    found = _inspect(arguments, standard)
    chosen = {"include": arguments.include or (), "sort": arguments.sort, "limit": arguments.limit}
    if arguments.json:
        standard.write(json.dumps(found.to_json(**chosen)))
        return DONE
    fold = standard.is_terminal() and not arguments.all
    standard.write(found.to_text(standard.width(), **chosen, fold=fold))
    return DONE


def _write_page(arguments: argparse.Namespace, standard: Standard) -> int:
    """The page of --html; the exit code says whether verifying found damage."""
    idle = [name for name in ("json", "all", "limit", "sort", "include") if getattr(arguments, name)]
    if idle:
        raise UsageError(f"--html writes a page of all tensors: --{', --'.join(idle)} would have no effect")
    target = standard.descriptor() if arguments.html == STANDARD else arguments.html
    if arguments.html != STANDARD:
        require_path("--html", arguments.html, "target")
        if arguments.source != STANDARD and _is_same(arguments.source, arguments.html):
            raise UsageError(f"--html names the file to be inspected, {printable(arguments.html)}: it would replace it")
    found = _inspect(arguments, standard)
    damages = _damages(found, arguments) if arguments.verify else None

    from stream_pack.inspection.page import page
    from stream_pack.writer.sink import open_sink

    data = page(found, damages)
    with open_sink(target) as sink:
        sink.begin(len(data), reserve=True)
        sink.put(0, data)
        sink.commit()
    return DAMAGE if damages else DONE


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them is not there
        return False


def _damages(found: Inspection, arguments: argparse.Namespace) -> tuple[Damage, ...]:
    """Raises: UsageError for what has no checksums that verify knows; RawPayloadError."""
    if arguments.source == STANDARD or found.kind not in IN_PLACE:
        raise UsageError(
            f"--verify is for the file of a pack, or of ExecuTorch's, and this is another source ({found.kind}); "
            "convert checks what it carries while it reads it"
        )
    from stream_pack.reader.verify import verify

    return verify(arguments.source, offset=arguments.offset).damages


def _inspect(arguments: argparse.Namespace, standard: Standard) -> Inspection:
    from stream_pack.inspection.inspect import inspect

    key, ignore_unknown = key_of(arguments), arguments.ignore_unknown
    if arguments.source == STANDARD:
        source = source_of(arguments, standard)
        return replace(inspect(source, key=key, ignore_unknown=ignore_unknown), path=STANDARD)
    require_path("SOURCE", arguments.source, "source")
    return inspect(arguments.source, offset=arguments.offset, key=key, ignore_unknown=ignore_unknown)


INSPECT = Command(
    summary="list the tensors of a pack or a checkpoint, and what fills the file",
    description="List the tensors of a pack, of anything that convert takes, or of a file that ExecuTorch wrote (a "
    ".pte, a .ptd, a payload of its MPS or XNNPACK delegate): dtype, shape, bytes, place, ties; what fills the file; "
    "and of a checkpoint, what convert would make of it. Only the head is read, no tensor data.",
    reads="anything",
    add_arguments=_add_arguments,
    run=_run,
)
