"""The jobs, each against what people use today, or against what the machine can do at best.

All but ``verify-cold`` run with a warm page cache: inputs have just been written or read.  "sync" is an fsync of the
file, which our own writer always does before the file gets its name.
"""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import safetensors
import safetensors.torch
import torch
import xxhash

import stream_pack
from perf.contest import Contender, Contest, timed
from perf.workspace import PYTHON, Workspace, environment, shell
from stream_pack.arguments.jobs import cores
from stream_pack.format import header_kinds, layout
from stream_pack.format.catalog import CatalogBuilder
from stream_pack.format.dtypes import BY_NAME
from stream_pack.format.head import encode_head
from stream_pack.reader.verify import verify as verify_pack
from stream_pack.writer import region
from tests.support.memory import peak_anonymous_nbytes

__all__ = ["CONTESTS", "Effort"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to spend: ``rounds`` of jobs that take a second or so, ``many`` of those that take milliseconds."""

    rounds: int
    many: int


def convert_file(work: Workspace, effort: Effort) -> Contest:
    """The main job, from a file."""
    source, target = work.checkpoint, work.path("target")

    def run(script: str) -> Callable[[], float]:
        return timed(
            lambda: shell(script, source=source, target=target, python=Path(PYTHON)),
            before=lambda: work.clear("target"),
        )

    return Contest(
        "convert-file",
        f"convert a checkpoint of {work.nbytes >> 20} MiB from a file",
        (
            Contender("stream_pack convert", run('"$python" -m stream_pack convert --quiet "$source" "$target"')),
            Contender("cp && sync", run('cp "$source" "$target" && sync "$target"')),
            Contender("cp", run('cp "$source" "$target"')),
        ),
        rounds=effort.rounds,
        nbytes=work.nbytes,
    )


def convert_pipe(work: Workspace, effort: Effort) -> Contest:
    """The main job, from a pipe."""
    source, target = work.checkpoint, work.path("target")

    def run(script: str) -> Callable[[], float]:
        return timed(
            lambda: shell(script, source=source, target=target, python=Path(PYTHON)),
            before=lambda: work.clear("target"),
        )

    return Contest(
        "convert-pipe",
        f"convert a checkpoint of {work.nbytes >> 20} MiB from a pipe",
        (
            Contender(
                "stream_pack convert -", run('cat "$source" | "$python" -m stream_pack convert --quiet - "$target"')
            ),
            Contender("cat | cat && sync", run('cat "$source" | cat > "$target" && sync "$target"')),
            Contender("cat | cat", run('cat "$source" | cat > "$target"')),
        ),
        rounds=effort.rounds,
        nbytes=work.nbytes,
    )


def save(work: Workspace, effort: Effort) -> Contest:
    """Live tensors to a file."""
    tensors, target = work.tensors(), work.path("target")

    def theirs_synced() -> None:
        safetensors.torch.save_file(tensors, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())

    def run(job: Callable[[], object]) -> Callable[[], float]:
        return timed(job, before=lambda: work.clear("target"))

    return Contest(
        "save",
        f"save_file of {work.nbytes >> 20} MiB in 32 tensors",
        (
            Contender("stream_pack.save_file", run(lambda: stream_pack.save_file(tensors, target))),
            Contender("safetensors save_file && fsync", run(theirs_synced)),
            Contender("safetensors save_file", run(lambda: safetensors.torch.save_file(tensors, target))),
        ),
        rounds=effort.rounds,
        nbytes=work.nbytes,
    )


def open_300(work: Workspace, effort: Effort) -> Contest:
    """Open a file of 300 tensors and take one."""
    return _open_one(work, effort, 300)


def open_100000(work: Workspace, effort: Effort) -> Contest:
    """Open a file of 100,000 tensors and take one."""
    return _open_one(work, effort, 100_000)


def _open_one(work: Workspace, effort: Effort, count: int) -> Contest:
    pack, other = work.many(count)
    name = f"layers.{count // 2}.weight"

    def ours() -> torch.Tensor:
        with stream_pack.open(pack) as opened:
            return opened[name].torch()

    def theirs() -> torch.Tensor:
        with safetensors.safe_open(other, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

    assert torch.equal(ours(), theirs())
    return Contest(
        f"open-{count}",
        f"open a file of {count:,} tensors and take one",
        (Contender("stream_pack.open", timed(ours)), Contender("safetensors.safe_open", timed(theirs))),
        rounds=effort.many,
    )


def load(work: Workspace, effort: Effort) -> Contest:
    """All tensors of a file as a state dict; no byte is looked at."""
    return _load(work, effort, "load", "load_file", lambda tensors: None)


def load_and_read(work: Workspace, effort: Effort) -> Contest:
    """All tensors of a file as a state dict, and every byte of them read."""

    def read(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor.view(torch.int64).sum()

    return _load(work, effort, "load-and-read", "load_file and read every byte", read)


def _load(
    work: Workspace, effort: Effort, name: str, title: str, use: Callable[[dict[str, torch.Tensor]], None]
) -> Contest:
    pack, other, checkpoint = work.pack, work.safetensors, work.checkpoint

    def run(load_tensors: Callable[[], dict[str, torch.Tensor]]) -> Callable[[], float]:
        return timed(lambda: use(load_tensors()))

    return Contest(
        name,
        f"{title}: {work.nbytes >> 20} MiB in 32 tensors",
        (
            Contender("stream_pack.load_file", run(lambda: stream_pack.load_file(pack))),
            Contender("safetensors load_file", run(lambda: safetensors.torch.load_file(other))),
            Contender("torch.load(mmap=True)", run(lambda: torch.load(checkpoint, mmap=True, weights_only=True))),
        ),
        rounds=effort.many if name == "load" else effort.rounds,
        nbytes=0 if name == "load" else work.nbytes,
    )


def verify(work: Workspace, effort: Effort) -> Contest:
    """All checksums of a pack, against a bare loop that reads and hashes the same bytes on as many threads."""
    return _verify(work, effort, "verify", jobs=None, cold=False)


def verify_one(work: Workspace, effort: Effort) -> Contest:
    """The same, on one thread."""
    return _verify(work, effort, "verify-one", jobs=1, cold=False)


def verify_cold(work: Workspace, effort: Effort) -> Contest:
    """The same as :func:`verify`, of a pack that is not in the page cache."""
    return _verify(work, effort, "verify-cold", jobs=None, cold=True)


BARE_STEP_NBYTES = 1 << 20
BARE_TASK_NBYTES = 32 << 20


def _verify(work: Workspace, effort: Effort, name: str, *, jobs: int | None, cold: bool) -> Contest:
    pack = work.pack

    def ours() -> None:
        assert verify_pack(pack, jobs=jobs).ok

    def task(fd: int, begin: int, nbytes: int) -> None:
        memory = memoryview(bytearray(BARE_STEP_NBYTES))
        for at in range(begin, min(begin + BARE_TASK_NBYTES, nbytes), BARE_STEP_NBYTES):
            xxhash.xxh3_64_intdigest(memory[: os.preadv(fd, [memory], at)])

    def bare() -> None:
        with pack.open("rb") as file, ThreadPoolExecutor(jobs or cores()) as threads:
            nbytes = pack.stat().st_size
            begins = range(0, nbytes, BARE_TASK_NBYTES)
            list(threads.map(lambda begin: task(file.fileno(), begin, nbytes), begins))

    def mapped() -> None:
        with pack.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            xxhash.xxh3_64_intdigest(mapping)

    def forget() -> None:
        if cold:
            with pack.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    threads = "one thread" if jobs == 1 else "all cores"
    return Contest(
        name,
        f"verify a pack of {work.nbytes >> 20} MiB, {threads}, {'not ' if cold else ''}page-cached",
        (
            Contender("verify", timed(ours, before=forget)),
            Contender("pread and XXH3 in a bare loop, as many threads", timed(bare, before=forget)),
            Contender("XXH3 of the mapping, one thread", timed(mapped, before=forget)),
        ),
        rounds=effort.rounds,
        nbytes=work.nbytes,
    )


class _Idle:
    """In the place of the hasher of blocks: counts them, and looks at no byte."""

    def __init__(self, block_nbytes: int) -> None:
        self._block_nbytes = block_nbytes
        self._filled = 0

    def update(self, data: memoryview | bytes) -> list[int]:
        done, self._filled = divmod(self._filled + len(data), self._block_nbytes)
        return [0] * done

    def finish(self) -> list[int]:
        return [0] if self._filled else []


def checksums(work: Workspace, effort: Effort) -> Contest:
    """What hashing costs on the way: the same conversion with and without, from a source that has no checksums."""
    source, target = work.safetensors, work.path("target")

    def convert() -> None:
        stream_pack.convert(source, target)

    def convert_idly() -> None:
        with patch.object(region, "BlockHasher", _Idle):
            convert()

    def run(job: Callable[[], None]) -> Callable[[], float]:
        return timed(job, before=lambda: work.clear("target"))

    return Contest(
        "checksums",
        f"convert safetensors of {work.nbytes >> 20} MiB, page-cached, with and without block checksums",
        (Contender("with checksums", run(convert)), Contender("without (not a pack that verifies)", run(convert_idly))),
        rounds=effort.rounds,
        nbytes=work.nbytes,
    )


def startup(work: Workspace, effort: Effort) -> Contest:
    """What a command costs before it does anything."""
    source, target = work.path("tiny.pt"), work.path("tiny.pack")
    torch.save({"w": torch.ones(3)}, source)

    def run(*arguments: str | Path) -> Callable[[], float]:
        return timed(
            lambda: subprocess.run([PYTHON, *arguments], stdout=subprocess.DEVNULL, env=environment(), check=True)
        )

    return Contest(
        "startup",
        "start-up",
        (
            Contender("convert of a tiny checkpoint", run("-m", "stream_pack", "convert", "--quiet", source, target)),
            Contender("stream_pack --help", run("-m", "stream_pack", "--help")),
            Contender("python -c pass", run("-c", "pass")),
            Contender("python -c 'import numpy'", run("-c", "import numpy")),
            Contender("python -c 'import torch'", run("-c", "import torch")),
        ),
        rounds=effort.rounds,
    )


def memory(work: Workspace, effort: Effort) -> Contest:
    """The peak of anonymous memory, the interpreter included."""
    source, target = work.checkpoint, work.path("target")
    command = (PYTHON, "-m", "stream_pack", "convert", "--quiet")

    def peak(*argv: str | Path) -> Callable[[], float]:
        def measure() -> float:
            work.clear("target")
            return peak_anonymous_nbytes(argv) / 2**20

        return measure

    def from_pipe() -> float:
        work.clear("target")
        with subprocess.Popen(["cat", source], stdout=subprocess.PIPE) as cat:
            return peak_anonymous_nbytes((*command, "-", target), stdin=cat.stdout) / 2**20

    return Contest(
        "memory",
        f"peak anonymous memory of converting {work.nbytes >> 20} MiB",
        (
            Contender("convert, file", peak(*command, source, target)),
            Contender("convert, pipe", from_pipe),
            Contender("python -c 'import numpy'", peak(PYTHON, "-c", "import numpy")),
            Contender("python -c 'import torch'", peak(PYTHON, "-c", "import torch")),
        ),
        rounds=min(effort.rounds, 3),
        unit="MiB",
    )


def plan_100000(work: Workspace, effort: Effort) -> Contest:
    """From the catalog of 100,000 tensors to a finished head."""
    return _plan(effort, 100_000)


def plan_1000000(work: Workspace, effort: Effort) -> Contest:
    """From the catalog of a million tensors to a finished head."""
    return _plan(effort, 1_000_000)


def _plan(effort: Effort, count: int) -> Contest:
    builder = CatalogBuilder()
    for k in range(count):
        builder.add(f"layers.{k}.weight", BY_NAME["bfloat16"], (64, 64), storage=k, start=0)
    catalog = builder.build(storages_nbytes=8192 * count)
    return Contest(
        f"plan-{count}",
        f"plan, graph and index of {count:,} tensors",
        (
            Contender(
                "plan and encode", timed(lambda: encode_head(layout.plan(catalog, layout.Policy()), header_kinds.MPS))
            ),
        ),
        rounds=min(effort.rounds, 3),
    )


CONTESTS: dict[str, Callable[[Workspace, Effort], Contest]] = {
    "convert-file": convert_file,
    "convert-pipe": convert_pipe,
    "save": save,
    "open-300": open_300,
    "open-100000": open_100000,
    "load": load,
    "load-and-read": load_and_read,
    "verify": verify,
    "verify-one": verify_one,
    "verify-cold": verify_cold,
    "checksums": checksums,
    "startup": startup,
    "memory": memory,
    "plan-100000": plan_100000,
    "plan-1000000": plan_1000000,
}
