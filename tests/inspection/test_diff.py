"""Two files are compared as their own libraries would compare them, and packs by what their checksums say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import stream_pack
from stream_pack.errors import OptionError, StreamPackError
from tests.sources.byte_sources import Dribble
from tests.support.kinds import FULL, KINDS, bits
from tests.support.torch_zips import saved

W = torch.arange(3000.0)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_pack_was_made_of_has_no_difference_to_it(kind: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source, wanted = KINDS[kind](tmp_path / "source")
    stream_pack.convert(source, tmp_path / "pack")
    for pair in ((source, tmp_path / "pack"), (tmp_path / "pack", source), (source, source)):
        found = stream_pack.diff(*pair)
        assert found.equal
        assert (found.same, found.changed, found.renamed) == (len(wanted), (), ())


TENSORS = [torch.ones(2), torch.ones(2, 1), torch.zeros(2), torch.ones(2).half(), torch.empty(0), W[:300], W[1:301]]
MODELS = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(TENSORS), max_size=6)


@given(MODELS, MODELS, st.sampled_from([4096, 1 << 16]), st.booleans())
def test_it_is_what_a_comparison_of_all_elements_says(
    tmp_path_factory: pytest.TempPathFactory,
    first: dict[str, torch.Tensor],
    second: dict[str, torch.Tensor],
    block_nbytes: int,
    packed: bool,
) -> None:
    folder = tmp_path_factory.mktemp("d")
    stream_pack.save_file(first, folder / "a")
    if packed:
        stream_pack.save_file(second, folder / "b", block_nbytes=block_nbytes)
    else:
        torch.save(second, folder / "b")
    found = stream_pack.diff(folder / "a", folder / "b")

    def known(tensor: torch.Tensor) -> object:
        return tensor.dtype, tuple(tensor.shape), bits(tensor)

    both = first.keys() & second.keys()
    changed = {name for name in both if known(first[name]) != known(second[name])}
    assert {tensor.name for tensor in found.changed} == changed
    assert found.same == len(both) - len(changed)
    gone, come = first.keys() - second.keys(), second.keys() - first.keys()
    old, new = [pair[0] for pair in found.renamed], [pair[1] for pair in found.renamed]
    assert ({*found.removed, *old}, {*found.added, *new}) == (gone, come)
    assert len(found.removed) + len(old) == len(gone)
    assert all(known(first[a]) == known(second[b]) for a, b in found.renamed)
    left = {known(first[name]) for name in found.removed if first[name].numel()}
    assert left.isdisjoint(known(second[name]) for name in found.added)


def test_packs_are_compared_by_their_checksums_and_the_blocks_that_differ_are_told(tmp_path: Path) -> None:
    changed = W.clone()
    changed[0] = -1
    changed[[2050, 2999]] = -1  # bytes 8200 and 11996: blocks 2 and 2 of 4096
    stream_pack.save_file({"w": W, "same": W + 1}, tmp_path / "a", block_nbytes=4096)
    stream_pack.save_file({"w": changed, "same": W + 1}, tmp_path / "b", block_nbytes=4096)
    found = stream_pack.diff(tmp_path / "a", tmp_path / "b")
    (tensor,) = found.changed
    assert (found.same, found.read_nbytes, found.block_nbytes) == (1, 0, 4096)
    assert tensor.ranges == ((0, 4096), (8192, 12000))
    assert (tensor.dtypes, tensor.shapes, tensor.nbytes) == (("float32",) * 2, ((3000,),) * 2, (12000,) * 2)


def test_a_view_in_a_larger_tensor_of_a_pack_is_read(tmp_path: Path) -> None:
    tensors = {"w": W, "part": W[64:]}
    stream_pack.save_file(tensors, tmp_path / "a", block_nbytes=4096)
    stream_pack.save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "b", block_nbytes=4096)
    found = stream_pack.diff(tmp_path / "a", tmp_path / "b")
    assert (found.equal, found.read_nbytes) == (True, 4 * (3000 - 64))


def test_packs_with_blocks_of_other_lengths_are_read_once(tmp_path: Path) -> None:
    stream_pack.save_file({"w": W}, tmp_path / "a", block_nbytes=4096)
    stream_pack.save_file({"w": W}, tmp_path / "b", block_nbytes=8192)
    found = stream_pack.diff(tmp_path / "a", tmp_path / "b")
    assert (found.equal, found.read_nbytes, found.block_nbytes) == (True, 12000, 4096)


def test_metadata_is_told_and_alone_is_no_difference(tmp_path: Path) -> None:
    stream_pack.save_file({"w": W}, tmp_path / "a", metadata={"x": "1", "y": "2"})
    stream_pack.save_file({"w": W}, tmp_path / "b", metadata={"x": "1", "y": "3", "z": ""})
    found = stream_pack.diff(tmp_path / "a", tmp_path / "b")
    assert (found.equal, found.metadata) == (True, ("y", "z"))


SPECIAL = [0.0, -0.0, 1.0, -1.5, float("nan"), float("inf"), float("-inf"), 1e-30, 65504.0]


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("float64", "float8_e5m2")])
@pytest.mark.parametrize("seed", range(3))
def test_values_are_those_that_torch_computes(dtypes: tuple[str, str], seed: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(seed)
    choose = torch.randint(len(SPECIAL), (2, 70_000), generator=generator)
    pair = [torch.tensor(SPECIAL, dtype=torch.float64)[row] for row in choose]
    pair[1][:60_000] = pair[0][:60_000] + torch.rand(60_000, generator=generator).double()
    a, b = (tensor.to(getattr(torch, dtype)) for tensor, dtype in zip(pair, dtypes))
    torch.save({"w": a.reshape(7, -1)}, tmp_path / "a")
    stream_pack.save_file({"w": b.reshape(7, -1)}, tmp_path / "b")
    (tensor,) = stream_pack.diff(tmp_path / "a", tmp_path / "b", values=True).changed
    assert tensor.values is not None
    x, y = a.double().numpy(), b.double().numpy()
    unequal = (x != y) & ~(np.isnan(x) & np.isnan(y))
    finite = unequal & np.isfinite(x) & np.isfinite(y)
    apart = np.abs(x[finite] - y[finite])
    assert tensor.values.elements == unequal.sum()
    assert tensor.values.not_finite == (unequal & ~finite).sum()
    assert tensor.values.largest == apart.max()
    assert tensor.values.largest_relative == (apart / np.maximum(np.abs(x[finite]), np.abs(y[finite]))).max()


def test_values_of_what_has_none_are_left_out(tmp_path: Path) -> None:
    first = {"ids": torch.arange(3), "shape": torch.ones(2, 3), "z": torch.ones(2), "a": torch.tensor([0.0, 2.0])}
    second = {"ids": torch.ones(3).long(), "shape": torch.ones(3, 2), "z": torch.zeros(2), "a": torch.tensor([-0.0, 3])}
    found = stream_pack.diff(first, second, values=True)
    told = {tensor.name: tensor.values for tensor in found.changed}
    assert told["ids"] is None
    assert told["shape"] is None
    assert told["z"] == stream_pack.ValueDifference(2, 1.0, 1.0, 0)
    assert told["a"] == stream_pack.ValueDifference(1, 1.0, 1 / 3, 0)  # 0 and -0 are other bytes, and equal


def test_a_selection_holds_for_both(tmp_path: Path) -> None:
    first, second = {"model": {"a": W, "b": W}, "x": {"c": W}}, {"model": {"a": W, "d": W}, "x": {}}
    torch.save(first, tmp_path / "a")
    torch.save(second, tmp_path / "b")
    found = stream_pack.diff(tmp_path / "a", tmp_path / "b", key="model", exclude="[bd]")
    assert (found.equal, found.same) == (True, 1)


def test_a_pipe_is_read_once_and_has_no_values(tmp_path: Path) -> None:
    stream_pack.save_file(FULL, tmp_path / "pack")
    assert stream_pack.diff(Dribble(saved(FULL), step=999), tmp_path / "pack").equal
    with pytest.raises(OptionError, match="second pass"):
        stream_pack.diff(Dribble(saved(FULL), step=999), tmp_path / "pack", values=True)


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_says_which_of_the_two_it_is_about(which: int, tmp_path: Path) -> None:
    stream_pack.save_file({"w": W}, tmp_path / "good")
    data = bytearray((tmp_path / "good").read_bytes())
    data[bytes(data).index(bits(W[:100]))] ^= 1
    (tmp_path / "bad").write_bytes(data)
    torch.save({"w": W}, tmp_path / "m.pt")
    pair = [tmp_path / "bad", tmp_path / "m.pt"]
    found = stream_pack.diff(*pair[:: 1 - 2 * which])  # by the checksums, which are whole
    assert found.equal
    (tmp_path / "bad").write_bytes(data[:-1])
    with pytest.raises(StreamPackError, match=r"^'.*bad': "):
        stream_pack.diff(*pair[:: 1 - 2 * which])


def run(*argv: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "stream_pack", "diff", *map(str, argv)]
    return subprocess.run(command, input=stdin, capture_output=True, check=False)


def test_the_command_prints_a_line_for_each_and_exits_with_1(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": W, "gone": torch.ones(2), "old": torch.ones(3)}, tmp_path / "1")
    safetensors.torch.save_file({"a": W + 1, "come": torch.ones(4), "new": torch.ones(3)}, tmp_path / "2")
    done = run(tmp_path / "1", tmp_path / "2", "--values")
    assert done.stdout.decode().splitlines() == [
        "- gone",
        "+ come",
        "> old -> new",
        "! a: blocks of 11.7 KiB of 11.7 KiB differ: bytes 0 to 12000, 3000 elements by up to 1, relative 1",
        "1 removed, 1 added, 1 renamed, 1 changed",
    ]
    assert (done.returncode, done.stderr) == (1, b"")
    done = run(tmp_path / "1", tmp_path / "2", "--json")
    said = json.loads(done.stdout)
    assert (done.returncode, said["equal"], said["schema"], said["renamed"]) == (1, False, 1, [["old", "new"]])
    done = run("-", tmp_path / "1", stdin=(tmp_path / "1").read_bytes())
    assert (done.returncode, done.stdout) == (0, b"no difference: 3 tensors\n")
    done = run("-q", tmp_path / "1", tmp_path / "2")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-", "-"], 2, "A and B are both -"),
        (["{}/1", ""], 2, "B is empty"),
        (["{}/1", "{}/none"], 3, "No such file"),
        (["{}/1", "{}/text"], 3, "text': cannot convert this input"),
        (["{}/cut", "{}/1"], 3, "cut': "),
        (["-", "{}/1", "--values"], 2, "second pass"),
    ],
)
def test_what_cannot_be_compared_never_looks_like_a_difference(
    words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    stream_pack.save_file({"w": W}, tmp_path / "1")
    (tmp_path / "text").write_text("a text")
    (tmp_path / "cut").write_bytes((tmp_path / "1").read_bytes()[:-1])
    done = run(*(word.format(tmp_path) for word in words), stdin=(tmp_path / "1").read_bytes())
    assert (done.returncode, done.stdout) == (code, b"")
    assert said in done.stderr.decode()
