"""Packs on the GPU: which buffer and offset each tensor has, and how long all of it lives."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import stream_pack
from stream_pack.errors import (
    AlignmentError,
    ChecksumError,
    LimitError,
    MappingInUse,
    MetalBufferError,
    MetalUnavailable,
    OptionError,
    RawPayloadError,
    StateError,
    TensorTooLarge,
    TruncatedError,
    UnknownTensorError,
    UnsupportedDtype,
)
from stream_pack.format.align import Alignment
from stream_pack.metal import Device, MetalView, Weights, objc
from tests.metal.bench import Bench, gone
from tests.metal.standin import StandIn
from tests.support.forks import in_a_forked_child
from tests.support.smaps import mapped_file

Arrays = dict[str, NDArray[np.generic]]
PAGE = 16384
ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20
needs_smaps = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="mappings are told by Linux's /proc")


def bytes_at(view: MetalView) -> bytes:
    """A tensor's bytes, found as Metal finds them: the buffer's contents plus the offset."""
    return ctypes.string_at(view.buffer.contents() + view.offset, view.nbytes)


def on(standin: StandIn, path: Path, **options: object) -> Weights:
    return stream_pack.metal.open(path, device=Device.default(standin.runtime), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [None, 3 * MIB, 2 * MIB + 4 * PAGE])
def test_every_tensor_has_its_bytes_at_contents_plus_offset(
    bench: Bench, pack_path: Path, arrays: Arrays, limit: int | None
) -> None:
    with stream_pack.metal.open(pack_path, device=bench.device(), max_buffer_length=limit) as weights:
        assert list(weights) == list(arrays)
        assert len(weights) == len(arrays)
        for name, array in arrays.items():
            view = weights[name]
            assert (view.name, view.shape, view.nbytes) == (name, array.shape, array.nbytes)
            assert view.dtype == array.dtype.name
            if array.nbytes:
                assert bytes_at(view) == array.tobytes(), name
                assert view.offset + view.nbytes <= view.buffer.nbytes
        lengths = [window.nbytes for window in weights.windows]
    assert len(lengths) == (1 if limit is None else 2)
    assert not any(nbytes % PAGE for nbytes in lengths)


def test_tied_tensors_and_parts_of_others_stand_where_those_stand(bench: Bench, tmp_path: Path) -> None:
    whole = np.arange(1 << 19, dtype=np.float32).reshape(512, 1024)
    path = tmp_path / "tied.pack"
    stream_pack.save_file({"whole": whole, "same": whole, "rows": whole[256:]}, path)
    with stream_pack.metal.open(path, device=bench.device()) as weights:
        assert weights["same"].offset == weights["whole"].offset
        assert weights["rows"].offset == weights["whole"].offset + MIB
        assert bytes_at(weights["rows"]) == whole[256:].tobytes()


def test_however_closely_packed_every_offset_suits_the_largest_element(standin: StandIn, tmp_path: Path) -> None:
    # Device space wants the alignment of the element: 16 bytes at most.
    arrays = {f"t{n}": np.arange(n, dtype=np.uint8) for n in range(1, 40)}
    path = tmp_path / "close.pack"
    stream_pack.save_file(arrays, path, alignment=Alignment(small=16))
    with on(standin, path) as weights:
        assert {view.offset % 16 for view in weights.values()} == {0}
        assert {view.offset % 256 for view in weights.values()} > {0}


@needs_smaps
def test_the_file_is_mapped_once_shared_and_read_only_and_no_page_is_copied(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "model.pack"
    stream_pack.save_file({"w": np.ones((512, 1024), np.float32), "b": np.ones(9)}, path)
    with stream_pack.metal.open(path, device=bench.device()) as weights:
        assert bytes_at(weights["w"]) == np.ones((512, 1024), np.float32).tobytes()
        entry = mapped_file(path)
        # The second map is the head's, whose columns are the index.
        assert set(entry.permissions) == {"r--s"}
        assert entry.anonymous == 0
        whole = os.stat(path).st_size
        assert entry.nbytes < whole + 2 * PAGE + mmap.PAGESIZE


def test_a_tensor_without_bytes_has_no_buffer(bench: Bench, pack_path: Path) -> None:
    with stream_pack.metal.open(pack_path, device=bench.device()) as weights:
        view = weights["empty"]
        assert (view.nbytes, view.offset) == (0, 0)
        with pytest.raises(MetalBufferError, match="'empty' of shape \\[0, 7\\] has no bytes"):
            _ = view.buffer
        with pytest.raises(MetalBufferError, match="'empty' .* has no bytes"):
            weights.own_buffer("empty")


def test_a_pack_without_bytes_has_no_window(tmp_path: Path, standin: StandIn) -> None:
    stream_pack.save_file({"empty": np.empty((0, 2), np.float32)}, tmp_path / "p")
    with on(standin, tmp_path / "p") as weights:
        assert weights.windows == ()


def test_an_unknown_name_is_a_key_error_that_names_it(standin: StandIn, pack_path: Path) -> None:
    with on(standin, pack_path) as weights:
        assert "nothing" not in weights
        assert weights.get("nothing") is None
        with pytest.raises(UnknownTensorError, match="'nothing'"):
            weights["nothing"]


def test_mps_dtypes_are_apples_numbers_and_what_mps_lacks_is_refused(standin: StandIn, tmp_path: Path) -> None:
    stream_pack.save_file({"a": np.ones(3, np.float16), "b": np.ones(3)}, tmp_path / "p")
    with on(standin, tmp_path / "p") as weights:
        assert weights["a"].mps_dtype == 0x1000_0010
        with pytest.raises(UnsupportedDtype, match="'b' has the dtype 'float64'") as caught:
            _ = weights["b"].mps_dtype
    assert (caught.value.tensor, caught.value.dtype) == ("b", "float64")


def test_a_page_aligned_tensor_gets_a_buffer_that_begins_with_it(bench: Bench, pack_path: Path, arrays: Arrays) -> None:
    with stream_pack.metal.open(pack_path, device=bench.device()) as weights:
        head = weights.own_buffer("head")
        assert ctypes.string_at(head.contents(), arrays["head"].nbytes) == arrays["head"].tobytes()
        assert head.nbytes == -(-arrays["head"].nbytes // PAGE) * PAGE
        assert head is weights["head"].own_buffer()
        assert head.address == weights["head"].buffer.address + weights["head"].offset


def test_a_tensor_inside_a_page_gets_no_buffer_of_its_own(standin: StandIn, pack_path: Path) -> None:
    with on(standin, pack_path) as weights, pytest.raises(AlignmentError, match="'bias' .*after a page"):
        weights.own_buffer("bias")


def test_tensors_too_large_for_any_buffer_are_named_the_largest_first_and_only_they_are_refused(
    standin: StandIn, pack_path: Path, arrays: Arrays
) -> None:
    with pytest.warns(RuntimeWarning, match="1048576 bytes here: 'head', 'embedding'; asking") as warned:
        weights = on(standin, pack_path, max_buffer_length=MIB)
    assert warned[0].filename == __file__
    assert weights.too_large == ("head", "embedding")
    assert len(weights) == len(arrays)
    for name, array in arrays.items():
        if name in weights.too_large:
            for ask in (weights.__getitem__, weights.own_buffer):
                with pytest.raises(TensorTooLarge, match=f"'{name}'") as caught:
                    ask(name)
                error = caught.value
                assert (error.tensors, error.nbytes, error.limit) == ((name,), array.nbytes, MIB)
            assert weights.pack[name].numpy().tobytes() == array.tobytes()
        elif array.nbytes:
            assert bytes_at(weights[name]) == array.tobytes()
    weights.close()
    assert standin.live() == 0


def test_the_limit_of_the_device_counts_as_well_as_that_of_the_caller(pack_path: Path) -> None:
    standin = StandIn(max_buffer_length=3 * MIB)
    with on(standin, pack_path, max_buffer_length=64 * MIB) as weights:
        assert len(weights.windows) == 2
    with pytest.raises(LimitError, match="at least one page"):
        on(standin, pack_path, max_buffer_length=4096)
    with pytest.raises(OptionError, match=r"3500000000\.0: expected an int, a number of bytes"):
        on(standin, pack_path, max_buffer_length=3.5e9)


def test_a_gpu_with_memory_of_its_own_is_refused_unless_asked_for(pack_path: Path) -> None:
    standin = StandIn(unified=False)
    with pytest.raises(MetalUnavailable, match="allow_discrete=True"):
        on(standin, pack_path)
    with on(standin, pack_path, allow_discrete=True) as weights:
        assert len(weights.windows) == 1


def test_more_than_the_recommended_working_set_is_a_warning(pack_path: Path) -> None:
    standin = StandIn(working_set=MIB)
    with pytest.warns(RuntimeWarning, match=r"working set that .* recommends \(1\.00 MiB\)") as caught:
        on(standin, pack_path).close()
    assert caught[0].filename == __file__


@needs_smaps
def test_when_metal_makes_no_buffer_the_file_is_let_go(tmp_path: Path, pack_path: Path) -> None:
    path = tmp_path / "own.pack"
    path.write_bytes(pack_path.read_bytes())
    with pytest.raises(MetalBufferError, match="returned no buffer"):
        on(StandIn(nil=True), path)
    gc.collect()
    assert mapped_file(path).permissions == ()


def test_a_raw_payload_is_refused(tmp_path: Path, standin: StandIn, pack_path: Path) -> None:
    with stream_pack.open(pack_path, kind="mps") as payload, pytest.raises(RawPayloadError):
        stream_pack.metal.open(payload, device=Device.default(standin.runtime))


@pytest.mark.parametrize("pages", [1, 3])
def test_a_pack_inside_another_file_is_used_in_place_at_a_page(
    bench: Bench, tmp_path: Path, pack_path: Path, arrays: Arrays, pages: int
) -> None:
    path = tmp_path / "program.pte"
    path.write_bytes(b"x" * PAGE * pages + pack_path.read_bytes() + b"the rest")
    with stream_pack.metal.open(path, offset=PAGE * pages, device=bench.device()) as weights:
        assert bytes_at(weights["head"]) == arrays["head"].tobytes()
        assert bytes_at(weights["mask"]) == arrays["mask"].tobytes()


def test_a_pack_that_begins_inside_a_page_is_refused(tmp_path: Path, standin: StandIn, pack_path: Path) -> None:
    path = tmp_path / "program.pte"
    path.write_bytes(b"x" * 16 + pack_path.read_bytes())
    with pytest.raises(AlignmentError, match="begins at byte 16, ") as caught:
        on(standin, path, offset=16)
    assert (caught.value.value, caught.value.alignment) == (16, PAGE)
    assert "newBufferWithBytesNoCopy:length:options:deallocator:" not in standin.calls


def test_a_file_made_shorter_meanwhile_is_noticed_before_it_is_wrapped(
    tmp_path: Path, standin: StandIn, pack_path: Path
) -> None:
    path = tmp_path / "short.pack"
    path.write_bytes(pack_path.read_bytes())
    with stream_pack.open(path) as pack:
        os.truncate(path, 2 * PAGE)
        with pytest.raises(TruncatedError, match="was truncated while it was open"):
            stream_pack.metal.open(pack, device=Device.default(standin.runtime))
    assert standin.live() == 0


def test_of_a_file_made_shorter_later_no_buffer_is_handed_out_any_more(
    tmp_path: Path, standin: StandIn, pack_path: Path
) -> None:
    path = tmp_path / "short.pack"
    path.write_bytes(pack_path.read_bytes())
    weights = on(standin, path)
    own = weights.own_buffer("head")
    view = weights["embedding"]
    os.truncate(path, 2 * MIB)
    for ask in (
        lambda: weights["head"],
        lambda: weights.own_buffer("head"),
        lambda: weights.own_buffer("embedding"),
        view.own_buffer,
        lambda: list(weights.values()),
        lambda: weights.windows,
    ):
        with pytest.raises(TruncatedError, match="was truncated while it was open"):
            ask()
    del own, view, ask
    gc.collect()  # exceptions and their frames
    weights.close()
    assert standin.live() == 0


def test_lazily_a_damaged_tensor_is_refused_and_others_are_handed_out(
    tmp_path: Path, standin: StandIn, pack_path: Path
) -> None:
    path = tmp_path / "damaged.pack"
    data = bytearray(pack_path.read_bytes())
    with stream_pack.open(pack_path) as pack:
        data[pack["head"].file_offset + 77] ^= 1
    path.write_bytes(data)
    with on(standin, path, verify="lazy") as weights:
        assert weights["embedding"].offset == 0
        for hand_out in (weights.__getitem__, weights.own_buffer):
            with pytest.raises(ChecksumError, match="'head'"):
                hand_out("head")
    with on(standin, path) as weights:
        assert weights["head"].nbytes


def test_what_belongs_to_opening_a_file_is_refused_beside_an_open_pack(standin: StandIn, pack_path: Path) -> None:
    device = Device.default(standin.runtime)
    with stream_pack.open(pack_path) as pack, pytest.raises(OptionError, match="cannot be given with an open Pack"):
        stream_pack.metal.open(pack, device=device, verify="lazy")


# Lifetime.


@needs_smaps
def test_leaving_the_block_unmaps_when_nobody_has_a_buffer(bench: Bench, tmp_path: Path, pack_path: Path) -> None:
    path = tmp_path / "own.pack"
    path.write_bytes(pack_path.read_bytes())
    with stream_pack.metal.open(path, device=bench.device()) as weights:
        window = weights.windows[0].token
    assert gone(bench, window)
    assert mapped_file(path).permissions == ()
    with pytest.raises(StateError, match="is closed"):
        weights["head"]
    with pytest.raises(StateError, match="is closed"):
        _ = weights.windows
    with pytest.raises(StateError, match="is closed"):
        len(weights)
    assert repr(weights) == f"<Weights '{path}', closed>"
    weights.close()


@needs_smaps
@pytest.mark.parametrize("first", ["view", "buffer"])
def test_the_mapping_goes_with_the_last_buffer_in_whatever_order(
    bench: Bench, tmp_path: Path, pack_path: Path, arrays: Arrays, first: str
) -> None:
    path = tmp_path / "own.pack"
    path.write_bytes(pack_path.read_bytes())
    kept: dict[str, object] = {}
    with stream_pack.metal.open(path, device=bench.device(), max_buffer_length=3 * MIB) as weights:
        kept["view"], kept["buffer"] = weights["head"], weights["embedding"].buffer
        assert kept["view"].buffer is not kept["buffer"]  # type: ignore[attr-defined]
    del weights
    last = "buffer" if first == "view" else "view"
    del kept[first]
    gc.collect()
    bench.wait()
    assert "r--s" in mapped_file(path).permissions
    left = kept[last]
    if isinstance(left, MetalView):
        assert bytes_at(left) == arrays["head"].tobytes()
    del left, kept[last]
    gc.collect()
    bench.wait()
    assert mapped_file(path).permissions == ()


@needs_smaps
def test_memory_stays_while_a_command_buffer_holds_the_buffer(
    tmp_path: Path, pack_path: Path, standin: StandIn
) -> None:
    path = tmp_path / "own.pack"
    path.write_bytes(pack_path.read_bytes())
    with on(standin, path) as weights:
        in_flight = weights["head"].buffer.pointer
        standin.retain(in_flight)
    assert standin.live() == 1
    assert "r--s" in mapped_file(path).permissions
    # The last reference goes on a thread of the driver's.
    driver = threading.Thread(target=standin.release, args=(in_flight,))
    driver.start()
    driver.join()
    assert standin.live() == 0
    assert mapped_file(path).permissions == ()


def test_a_buffer_may_be_dropped_while_an_exception_is_on_its_way(bench: Bench, pack_path: Path) -> None:
    with stream_pack.metal.open(pack_path, device=bench.device()) as weights:
        with pytest.raises(ZeroDivisionError) as caught:
            _ = [weights.own_buffer("head"), 1 / 0]
        assert caught.value.__context__ is None
        assert gone(bench, *set(chain.from_iterable(weights._made.values())) - {weights.windows[0].token})


def test_closing_with_live_buffers_names_their_tensors_and_closes_nothing(
    bench: Bench, pack_path: Path, arrays: Arrays
) -> None:
    weights = stream_pack.metal.open(pack_path, device=bench.device(), max_buffer_length=3 * MIB)
    views = [weights["head"], weights["mask"]]
    dropped = weights["embedding"]
    del dropped
    with pytest.raises(MappingInUse, match="'head', 'mask'"):
        weights.close()  # lets go of what nobody has
    bench.wait()
    with pytest.raises(MappingInUse) as caught:
        weights.close()
    assert caught.value.tensors == ("head", "mask")
    assert bytes_at(weights["embedding"]) == arrays["embedding"].tobytes()
    views.clear()
    close(bench, weights)
    with pytest.raises(StateError):
        weights["head"]


def close(bench: Bench, weights: Weights) -> None:
    """Close; where buffers die on a thread of their own, the first attempt only lets go of them."""
    try:
        weights.close()
    except MappingInUse:
        assert bench.kind != "python"
        assert gone(bench, *chain.from_iterable(weights._made.values()))
        weights.close()


def test_a_window_taken_as_a_whole_counts_for_all_its_tensors(
    standin: StandIn, pack_path: Path, arrays: Arrays
) -> None:
    weights = on(standin, pack_path)
    window = weights.windows[0]
    for _ in range(2):
        with pytest.raises(MappingInUse, match="and 1 more") as caught:
            weights.close()
        assert set(caught.value.tensors) == set(arrays) - {"empty"}
    del window
    weights.close()


def test_a_window_keeps_weights_over_a_pack_of_the_callers_from_closing(standin: StandIn, pack_path: Path) -> None:
    device = Device.default(standin.runtime)
    with stream_pack.open(pack_path) as pack:
        weights = stream_pack.metal.open(pack, device=device)
        window = weights.windows[0]
        with pytest.raises(MappingInUse):
            weights.close()
        del window
        weights.close()


def test_a_buffer_that_only_metal_holds_keeps_the_pack_from_closing(standin: StandIn, pack_path: Path) -> None:
    weights = on(standin, pack_path)
    pointer = weights["bias"].buffer.pointer
    standin.retain(pointer)
    with pytest.raises(MappingInUse, match="wait for command buffers") as caught:
        weights.close()
    assert caught.value.tensors == ("bias",)
    standin.release(pointer)
    weights.close()


def test_a_pack_of_the_callers_stays_open_and_names_what_is_in_use(
    standin: StandIn, pack_path: Path, arrays: Arrays
) -> None:
    device = Device.default(standin.runtime)
    pack = stream_pack.open(pack_path)
    with stream_pack.metal.open(pack, device=device) as weights:
        view = weights["head"]
    with pytest.raises(MappingInUse, match="'embedding'") as caught:
        pack.close()
    assert set(caught.value.tensors) == set(arrays) - {"empty"}
    del view, weights
    assert pack["bias"].numpy().tobytes() == arrays["bias"].tobytes()
    pack.close()


def test_two_openings_of_one_pack_share_its_memory(standin: StandIn, pack_path: Path) -> None:
    device = Device.default(standin.runtime)
    with stream_pack.open(pack_path) as pack:
        first = stream_pack.metal.open(pack, device=device)
        second = stream_pack.metal.open(pack, device=device)
        view = first["head"]
        assert view.buffer.contents() == second["head"].buffer.contents()
        second.close()  # what the first has handed out is no business of the second's
        assert objc.kept(view.buffer.token)
        with pytest.raises(MappingInUse, match="'head'"):
            first.close()
        del view
        first.close()
    assert standin.live() == 0


@needs_smaps
def test_closing_unmaps_a_file_that_was_opened_here_and_no_pack_of_the_callers(
    bench: Bench, tmp_path: Path, pack_path: Path
) -> None:
    path = tmp_path / "own.pack"
    path.write_bytes(pack_path.read_bytes())
    weights = stream_pack.metal.open(path, device=bench.device())
    assert "r--s" in mapped_file(path).permissions
    close(bench, weights)
    assert mapped_file(path).permissions == ()
    pack = stream_pack.open(path)
    close(bench, stream_pack.metal.open(pack, device=bench.device()))
    assert "r--s" in mapped_file(path).permissions
    pack.close()
    assert mapped_file(path).permissions == ()


def test_buffers_that_come_and_go_leave_no_trace(standin: StandIn, pack_path: Path) -> None:
    with on(standin, pack_path) as weights:
        for _ in range(5):
            weights.own_buffer("head")
        own = weights.own_buffer("head")
        assert sorted(weights._made.values()) == sorted([[weights.windows[0].token], [own.token]])


def test_residency_is_held_while_the_weights_are_open(standin: StandIn, pack_path: Path) -> None:
    with on(standin, pack_path, residency=True) as weights:
        assert standin.resident == [weights.windows[0].pointer]
    assert standin.resident == []
    assert standin.live() == 0
    assert standin.violations == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_weights_of_a_parent_are_refused_in_a_forked_child_and_stay_whole(
    standin: StandIn, pack_path: Path, arrays: Arrays
) -> None:
    with on(standin, pack_path) as weights:
        for action in (lambda: weights["head"], lambda: weights.own_buffer("head"), weights.close):
            assert "MetalUnavailable" in in_a_forked_child(action)
        assert in_a_forked_child(lambda: weights.__exit__(None, None, None)) == "nothing"
        assert bytes_at(weights["head"]) == arrays["head"].tobytes()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_never_waits_for_what_a_thread_of_its_parent_was_doing(pack_path: Path) -> None:
    asked, answer = threading.Event(), threading.Event()

    class Slow(StandIn):
        slow = False

        def _send(self, receiver: int, selector: int, *words: int | None) -> int | None:
            if self.slow and threading.current_thread() is not threading.main_thread():
                asked.set()
                answer.wait(60)
            return super()._send(receiver, selector, *words)

    standin = Slow()
    weights = on(standin, pack_path)
    view = weights["head"]
    standin.slow = True
    for ask in (lambda: weights.own_buffer("head"), lambda: weights.device.name):
        asked.clear()
        answer.clear()
        thread = threading.Thread(target=ask)
        thread.start()
        assert asked.wait(60)  # inside Metal, with every lock that it takes
        for action in (
            lambda: weights["head"],
            lambda: weights.own_buffer("head"),
            lambda: weights.windows,
            lambda: weights.device.name,
            lambda: list(weights),
            lambda: len(weights),
            lambda: "head" in weights,
            view.own_buffer,
            view.buffer.contents,
            weights.close,
        ):
            assert in_a_forked_child(action).startswith("MetalUnavailable: Metal does not work after a fork")
        assert in_a_forked_child(lambda: weights.__exit__(None, None, None)) == "nothing"
        assert in_a_forked_child(lambda: repr(weights)) == "nothing"
        answer.set()
        thread.join()
    standin.slow = False
    del view
    weights.close()
    assert standin.violations == []


EXIT = """
import ctypes, sys
from pathlib import Path
import stream_pack.metal
from stream_pack.metal import Device
from tests.metal.bench import c_bench

bench = c_bench(Path(sys.argv[1]))
library = ctypes.CDLL(sys.argv[1] + "/standin.so")
weights = stream_pack.metal.open(sys.argv[2], device=Device.default(bench.runtime))
view = weights["head"]
cycle = [weights, view]
cycle.append(cycle)

# Another library holds a second buffer, and lets go of it after Python has ended.
others = weights.own_buffer("embedding")
library.objc_msgSend(ctypes.c_void_p(others.pointer), b"retain")
library.standin_hold(ctypes.c_void_p(others.pointer))
del others
print("ready", flush=True)
"""


def test_at_exit_with_live_buffers_nothing_is_released_and_nothing_crashes(tmp_path: Path, pack_path: Path) -> None:
    from tests.metal.bench import compiler

    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in with")
    result = subprocess.run(
        [sys.executable, "-X", "dev", "-c", EXIT, tmp_path, pack_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "ready\nread 1228800 bytes, 0 releases since\n", "")
