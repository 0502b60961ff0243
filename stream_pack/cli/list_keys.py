"""``convert --list-keys``: show which keys of a checkpoint hold tensors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from stream_pack.cli.exits import DONE
from stream_pack.cli.terminal import Standard
from stream_pack.text import human_nbytes, printable

if TYPE_CHECKING:
    from stream_pack.pipeline.source import Source
    from stream_pack.sources.torch_save.outline import KeySummary

__all__ = ["list_keys"]


def list_keys(source: str | int | Source, arguments: argparse.Namespace, standard: Standard) -> int:
    """Print a row for each key that holds tensors."""
    from stream_pack.sources.open import list_keys

    rows = list_keys(source, spool_dir=arguments.spool_dir)
    standard.write(json.dumps([asdict(row) for row in rows]) if arguments.json else _table(rows))
    return DONE


def _table(rows: Sequence[KeySummary]) -> str:
    keys = [printable(".".join(row.path) or ".") for row in rows]
    width = max(len(key) for key in ("key", *keys))
    lines = [f"{'key':<{width}}  {'tensors':>9}  {'storages':>10}  kind"]
    for key, row in zip(keys, rows):
        default = "  <- taken by default" if row.chosen else ""
        lines.append(
            f"{key:<{width}}  {row.tensors:>9}  {human_nbytes(row.nbytes):>10}  {printable(row.kind)}{default}"
        )
    return "\n".join(lines)
