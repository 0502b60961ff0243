"""``python -m perf``: all benchmarks, or those named with ``--only``."""

from __future__ import annotations

import argparse
import os
import platform

import safetensors
import torch

import stream_pack
from perf.contest import hold
from perf.contests import CONTESTS, Effort
from perf.workspace import Workspace


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="perf", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="64 MiB and 2 rounds: whether it runs, not how fast")
    parser.add_argument("--only", metavar="NAME", action="append", choices=list(CONTESTS), help=", ".join(CONTESTS))
    arguments = parser.parse_args()
    quick = arguments.quick
    effort = Effort(rounds=2, many=5) if quick else Effort(rounds=5, many=50)
    print(
        f"stream_pack {stream_pack.__version__}, torch {torch.__version__}, safetensors {safetensors.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores; "
        "warm page cache"
    )
    with Workspace(nbytes=(64 << 20) if quick else (1 << 30)) as work:
        for name in arguments.only or CONTESTS:
            result = hold(CONTESTS[name](work, effort))
            print(f"\n{result.table()}\n{result.to_json()}", flush=True)


main()
