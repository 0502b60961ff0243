"""``inspect``: list the tensors of a pack or a checkpoint, and what fills the file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stream_pack.arguments.paths import require_path
from stream_pack.cli.arguments import STANDARD, Command, add_flag, add_offset, add_option, positive
from stream_pack.cli.exits import DONE
from stream_pack.cli.reading import add_keys, key_of, source_of
from stream_pack.cli.terminal import Standard

if TYPE_CHECKING:
    from stream_pack.inspection.inspection import Inspection

__all__ = ["INSPECT"]


def _add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a pack, or what convert takes; - reads stdin, only its head")
    add_offset(parser)
    add_flag(parser, "--json", text="print JSON instead of text, also for an error")
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
    found = _inspect(arguments, standard)
    chosen = {"include": arguments.include or (), "sort": arguments.sort, "limit": arguments.limit}
    if arguments.json:
        standard.write(json.dumps(found.to_json(**chosen)))
        return DONE
    fold = standard.is_terminal() and not arguments.all
    standard.write(found.to_text(standard.width(), **chosen, fold=fold))
    return DONE


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
