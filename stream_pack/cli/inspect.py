"""``inspect``: list the tensors of a pack, and what fills the file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from stream_pack.cli.arguments import Command, add_file, local_file
from stream_pack.cli.exits import DONE
from stream_pack.cli.terminal import Standard

__all__ = ["INSPECT"]


def _add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    add_file(parser, "FILE")


def _run(arguments: argparse.Namespace, standard: Standard) -> int:
    from stream_pack.inspection.inspect import inspect

    found = inspect(local_file(arguments, "FILE"), offset=arguments.offset)
    text = json.dumps(found.to_json()) if arguments.json else found.to_text(standard.width())
    standard.write(text)
    return DONE


INSPECT = Command(
    summary="list the tensors of a pack, and what fills the file",
    description="List the tensors of a pack, or of a file that ExecuTorch wrote (a .pte, a .ptd, a payload of its MPS "
    "or XNNPACK delegate), and what every byte of the file is used for.",
    reads="pack",
    add_arguments=_add_arguments,
    run=_run,
)
