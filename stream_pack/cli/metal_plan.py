"""``metal-plan``: show how Metal will use a pack."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from stream_pack.cli.arguments import Command, add_file, add_option, local_file, nbytes
from stream_pack.cli.exits import DONE, INPUT, UsageError
from stream_pack.cli.terminal import Standard
from stream_pack.errors import LimitError

__all__ = ["METAL_PLAN"]


def _add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    add_file(parser, "PACK")
    text = "the device's maximum buffer length (default 3.5G, the limit of the smallest Macs)"
    add_option(parser, "--max-buffer-length", "NBYTES", text, type=nbytes)


def _run(arguments: argparse.Namespace, standard: Standard) -> int:
    from stream_pack.metal.plan import MAX_BUFFER_LENGTH, plan_metal
    from stream_pack.reader.pack import open as open_pack

    limit = arguments.max_buffer_length
    with open_pack(local_file(arguments, "PACK"), offset=arguments.offset) as pack:
        try:
            plan = plan_metal(pack, max_buffer_length=MAX_BUFFER_LENGTH if limit is None else limit)
        except LimitError as error:
            raise UsageError(str(error)) from None
    standard.write(json.dumps(plan.to_json()) if arguments.json else plan.to_text())
    return INPUT if plan.unbound else DONE


METAL_PLAN = Command(
    summary="show how a Mac's GPU will use a pack, on any machine",
    description="Show how Metal will use a pack: which buffers hold which tensors, which tensors cannot be used in "
    "place, and other warnings. No Mac is needed. The exit code is 3 if a tensor cannot be used in place.",
    reads="pack",
    add_arguments=_add_arguments,
    run=_run,
)
