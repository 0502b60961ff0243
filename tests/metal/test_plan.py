"""What a Mac will make of a pack, told without one."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import stream_pack
from stream_pack.cli import main
from stream_pack.errors import AlignmentError, LimitError, RawPayloadError, TensorTooLarge
from stream_pack.format.align import Alignment
from stream_pack.metal import Device
from stream_pack.metal.plan import plan_metal
from tests.metal.standin import StandIn

Arrays = dict[str, NDArray[np.generic]]
PAGE = 16384
MIB = 1 << 20


def test_the_windows_predicted_are_those_that_metal_gets(pack_path: Path) -> None:
    device = Device.default(StandIn().runtime)
    for limit in (8 * MIB, 3 * MIB):
        with stream_pack.open(pack_path) as pack:
            plan = plan_metal(pack, max_buffer_length=limit)
            with stream_pack.metal.open(pack, device=device, max_buffer_length=limit) as weights:
                lengths = [window.nbytes for window in weights.windows]
        assert [window.nbytes for window in plan.windows] == lengths


@pytest.mark.parametrize("seed", range(40))
def test_opening_does_what_the_plan_says(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.choice([0, 1, 300, PAGE, 3 * PAGE + 1, MIB, MIB + 5, 2 * MIB - 4], int(random.integers(1, 9)))
    path = tmp_path / "in.file"
    alignment = Alignment(small=int(random.choice([16, 256, PAGE])), large=int(random.choice([PAGE, 4 * PAGE])))
    stream_pack.save_file(
        {f"t{n}": np.zeros(size, np.uint8) for n, size in enumerate(sizes)}, path, alignment=alignment
    )
    offset = int(random.choice([0, 0, PAGE, 3 * PAGE, 4096, 16]))
    path.write_bytes(bytes(offset) + path.read_bytes())
    limit = int(random.choice([PAGE, 4 * PAGE, MIB, MIB + PAGE, 2 * MIB + 3, 64 * MIB]))
    made: list[tuple[int, int]] = []

    class Spy(StandIn):
        def _wrap(self, receiver: int, *words: int) -> int | None:
            made.append((words[0], words[1]))
            return super()._wrap(receiver, *words)

    spy = Spy(max_buffer_length=limit)
    with stream_pack.open(path, offset=offset) as pack:
        plan = plan_metal(pack, max_buffer_length=limit)
        unbound = {tensor.name for tensor in plan.unbound}
        held = {f"t{n}" for n, size in enumerate(sizes) if size}
        if any("opening it is refused" in tensor.reason for tensor in plan.unbound):
            assert unbound == held
            with pytest.raises(AlignmentError):
                stream_pack.metal.open(pack, device=Device.default(spy.runtime))
            assert (made, plan.windows, plan.own_buffers) == ([], (), 0)
            return
        base = pack.memory(0, 1, tensors=()).ctypes.data
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights = stream_pack.metal.open(pack, device=Device.default(spy.runtime))
        assert len(caught) == bool(unbound)
        assert [(address - base, nbytes) for address, nbytes in made] == [
            (window.file_offset, window.nbytes) for window in plan.windows
        ]
        own = 0
        for name in held:
            if name in unbound:
                for ask in (weights.__getitem__, weights.own_buffer):
                    with pytest.raises(TensorTooLarge, match=f"'{name}'"):
                        ask(name)
                continue
            view = weights[name]
            assert view.buffer.address + view.offset == base + pack[name].file_offset
            try:
                own += weights.own_buffer(name).address == base + pack[name].file_offset
            except AlignmentError:
                assert pack[name].file_offset % PAGE
        assert own == plan.own_buffers
        assert set(weights.too_large) == unbound
        assert spy.violations == []


def test_every_window_is_pages_and_has_its_tensors(pack_path: Path, arrays: Arrays) -> None:
    with stream_pack.open(pack_path) as pack:
        plan = plan_metal(pack, max_buffer_length=3 * MIB)
        places = {name: (pack[name].file_offset, pack[name].nbytes) for name in arrays}
    assert len(plan.windows) == 2
    assert sum(window.tensors for window in plan.windows) == len(arrays) - 1
    for window in plan.windows:
        assert window.file_offset % PAGE == window.nbytes % PAGE == 0
        for name in (window.first, window.last):
            offset, nbytes = places[name]
            assert window.file_offset <= offset
            assert offset + nbytes <= window.file_offset + window.nbytes
    assert (plan.windows[0].first, plan.windows[1].last) == ("embedding", "mask")
    assert (plan.unbound_nbytes, plan.unbound) == (0, ())
    assert plan.mapped_nbytes == sum(window.nbytes for window in plan.windows)


def test_tensors_too_large_are_named_with_their_bytes(pack_path: Path, arrays: Arrays) -> None:
    with stream_pack.open(pack_path) as pack:
        plan = plan_metal(pack, max_buffer_length=2 * MIB)
    assert [tensor.name for tensor in plan.unbound] == ["head"]
    assert plan.unbound_nbytes == plan.unbound[0].nbytes == arrays["head"].nbytes
    assert "too large for a buffer of at most 2097152 bytes" in plan.unbound[0].reason


def test_a_pack_that_begins_inside_a_page_cannot_be_used_in_place(
    tmp_path: Path, pack_path: Path, arrays: Arrays
) -> None:
    path = tmp_path / "program.pte"
    path.write_bytes(bytes(4096) + pack_path.read_bytes())
    with stream_pack.open(path, offset=4096) as pack:
        plan = plan_metal(pack)
    assert plan.windows == ()
    assert {tensor.name for tensor in plan.unbound} == set(arrays) - {"empty"}
    assert "alignment: the pack begins at byte 4096" in plan.unbound[0].reason


def test_own_buffers_are_counted(pack_path: Path, arrays: Arrays) -> None:
    with stream_pack.open(pack_path) as pack:
        aligned = [n for n in arrays if pack[n].nbytes and pack[n].file_offset % PAGE == 0]
        assert plan_metal(pack).own_buffers == len(aligned) >= 2


def test_what_needs_a_newer_system_or_is_missing_in_mps_is_warned_of(tmp_path: Path) -> None:
    tensors = {
        "b": torch.ones(3, dtype=torch.bfloat16),
        "d": torch.ones(3, dtype=torch.float64),
        "e": torch.ones(2, dtype=torch.float64),
    }
    path = tmp_path / "p"
    stream_pack.save_file(tensors, path, alignment=Alignment(small=16))
    with stream_pack.open(path) as pack:
        said = plan_metal(pack).warnings
    assert said[0] == "bfloat16 needs macOS 14 ('b')"
    assert said[1] == "MPS has no dtype 'float64': only your own kernels can use it ('d' and 1 more)"
    assert "not at a multiple of 256" in said[2]
    assert len(said) == 3


def test_a_raw_payload_has_no_plan(pack_path: Path) -> None:
    with stream_pack.open(pack_path, kind="mps") as payload, pytest.raises(RawPayloadError):
        plan_metal(payload)


def test_a_limit_below_a_page_is_refused(pack_path: Path) -> None:
    with stream_pack.open(pack_path) as pack, pytest.raises(LimitError):
        plan_metal(pack, max_buffer_length=PAGE - 1)


# The command.


def test_the_command_prints_windows_and_a_summary(pack_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["metal-plan", str(pack_path), "--max-buffer-length", "3M"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("window 0: ")
    assert "embedding to " in lines[0]
    assert lines[-1].startswith("Metal: 2 windows of at most 3.00 MiB, 3.")
    assert lines[-1].endswith(" MiB mapped, nothing copied")


def test_the_command_prints_json_and_takes_fractions(pack_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["metal-plan", str(pack_path), "--max-buffer-length", "3.5G", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["max_buffer_length"] == 3_758_096_384
    assert [window["first"] for window in plan["windows"]] == ["embedding"]
    assert (plan["unbound_nbytes"], plan["unbound"]) == (0, [])


def test_the_command_fails_when_a_tensor_cannot_be_used_in_place(
    pack_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["metal-plan", str(pack_path), "--max-buffer-length", "2M"]) == 3
    out = capfd.readouterr().out
    assert "not in place: head, 2129920 bytes: too large" in out
    assert "1 of 7 tensors (2.03 MiB) cannot be used in place" in out


@pytest.mark.parametrize("wrong", ["4K", "0", "1.00001G", "many", "3.5.1G"])
def test_a_limit_that_cannot_be_is_wrong_usage(pack_path: Path, wrong: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["metal-plan", str(pack_path), "--max-buffer-length", wrong]) == 2
    assert capfd.readouterr().err


def test_inspect_ends_with_the_summary(pack_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(pack_path)]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("Metal: 1 window of at most 3.50 GiB")


def test_an_app_on_ios_is_told_both_entitlements(tmp_path: Path) -> None:
    from stream_pack.metal.rules import IOS_HINT

    assert "com.apple.developer.kernel.extended-virtual-addressing" in IOS_HINT
    assert "com.apple.developer.kernel.increased-memory-limit" in IOS_HINT
