"""``metal-plan``: what a Mac will make of a pack."""

from __future__ import annotations

import json

from stream_pack.cli.arguments import Arguments
from stream_pack.cli.exits import DONE, INPUT, UsageError
from stream_pack.cli.terminal import Standard
from stream_pack.errors import LimitError

__all__ = ["metal_plan"]


def metal_plan(arguments: Arguments, standard: Standard) -> int:
    """Print the plan.  The exit code tells whether every tensor can be used in place."""
    from stream_pack.metal.plan import MAX_BUFFER_LENGTH, plan_metal
    from stream_pack.reader.pack import open as open_pack

    with open_pack(arguments.source, offset=arguments.offset) as pack:
        limit = arguments.max_buffer_length
        try:
            plan = plan_metal(pack, max_buffer_length=MAX_BUFFER_LENGTH if limit is None else limit)
        except LimitError as error:
            raise UsageError(str(error)) from None
    standard.write(json.dumps(plan.to_json()) if arguments.json else plan.to_text())
    return INPUT if plan.unbound else DONE
