"""``python -m perf.export``, where ExecuTorch is installed: exports with streamed constants, beside ExecuTorch's own.

Two tables, each with its JSON line, for each case: seconds, and the memory needed beyond the model's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

import stream_pack
from perf.contest import Contender, Contest, Result, hold
from perf.export_child import CASES, WAYS
from perf.workspace import PYTHON, Workspace, environment

NAMES = {"streamed": "streaming_constants", "stock": "ExecuTorch alone"}


def export(work: Workspace, case: str, *, rounds: int) -> tuple[Result, Result]:
    """One case, in turns: seconds, and MiB beyond the model."""
    added: dict[str, list[float]] = {name: [] for name in NAMES.values()}

    def run(way: str) -> Callable[[], float]:
        def measure() -> float:
            work.clear("program.pte")
            argv = (PYTHON, "-m", "perf.export_child", case, way, str(work.nbytes))
            done = subprocess.run(
                [*argv, work.path("program.pte")],
                capture_output=True,
                text=True,
                cwd=Path(stream_pack.__file__).parent.parent,
                env=environment(),
            )
            if done.returncode:
                raise SystemExit(f"{done.stderr}\n{case}, {NAMES[way]}: failed")
            answer = json.loads(done.stdout.splitlines()[-1])
            added[NAMES[way]].append(answer["added_nbytes"] / 2**20)
            seconds: float = answer["seconds"]
            return seconds

        return measure

    contest = Contest(
        f"export-{case}",
        f"export of a model of {work.nbytes >> 20} MiB, {case}: from the model to the synced program",
        [Contender(NAMES[way], run(way)) for way in WAYS],
        rounds=rounds,
        nbytes=work.nbytes,
    )
    seconds = hold(contest)
    memory = dataclasses.replace(
        contest,
        name=f"{contest.name}-memory",
        title=f"memory for that, beyond the model's {work.nbytes >> 20} MiB",
        unit="MiB",
        nbytes=0,
    )
    # hold() has one round before those that count.
    return seconds, Result(memory, {name: figures[1:] for name, figures in added.items()})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="perf.export", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="128 MiB and 1 round: whether it runs, not how fast")
    parser.add_argument("--only", metavar="CASE", action="append", choices=list(CASES), help=", ".join(CASES))
    arguments = parser.parse_args()
    quick = arguments.quick
    print(
        f"stream_pack {stream_pack.__version__}, executorch {version('executorch')}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    )
    has_mps = find_spec("executorch.backends.apple.mps") is not None  # up to 1.4
    with Workspace(nbytes=(128 << 20) if quick else (1 << 30)) as work:
        for case in arguments.only or CASES:
            if has_mps or not case.startswith("mps"):
                for result in export(work, case, rounds=1 if quick else 3):
                    print(f"\n{result.table()}\n{result.to_json()}", flush=True)


if __name__ == "__main__":
    main()
