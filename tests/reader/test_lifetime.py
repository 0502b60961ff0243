"""How long a mapping lives: as long as something of it does, and not a moment longer."""

from __future__ import annotations

import errno
import gc
import mmap
import multiprocessing
import os
import pickle
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import stream_pack
from stream_pack import MappingInUse, StateError, TruncatedError
from stream_pack.reader import mapping as mapping_module
from stream_pack.reader.file_range import FileRange
from stream_pack.reader.mapping import Mapping
from tests.support.memory import needs_proc
from tests.support.packs import BLOCK_NBYTES, pack_bytes, tensors
from tests.support.smaps import mapped_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "pack"
    pack_bytes(path)
    return path


def open_descriptors(path: Path) -> int:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(os.path.realpath(link) == str(path) for link in links)


@needs_proc
@pytest.mark.parametrize("verify", ["never", "lazy", "full"])
def test_after_close_neither_mapping_nor_descriptor_remains(path: Path, verify: str) -> None:
    # ST#164, ST#574
    pack = stream_pack.open(path, verify=verify)  # type: ignore[arg-type]
    pack["embed"].numpy()
    pack["embed"].torch()
    assert mapped_file(path).permissions != ()
    pack.close()
    assert mapped_file(path).permissions == ()
    assert open_descriptors(path) == 0


@needs_proc
def test_a_pack_that_is_only_forgotten_closes_by_itself(path: Path) -> None:
    array = stream_pack.open(path)["embed"].numpy()
    assert open_descriptors(path) > 0
    assert np.array_equal(array, tensors()["embed"].numpy())
    del array
    gc.collect()
    assert mapped_file(path).permissions == ()
    assert open_descriptors(path) == 0


@needs_proc
def test_an_error_of_opening_leaves_nothing_open(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(stream_pack.TruncatedError):
        stream_pack.open(path)
    gc.collect()
    assert mapped_file(path).permissions == ()
    assert open_descriptors(path) == 0


@pytest.mark.parametrize("form", ["numpy", "derived", "torch", "torch view", "raw", "slice of raw", "slice"])
def test_close_refuses_while_something_lives_and_names_it(path: Path, form: str) -> None:
    # ST#164, ST#574, kohya_ss#2466
    pack = stream_pack.open(path)
    view = pack["embed"]
    forms: dict[str, Callable[[], object]] = {
        "numpy": view.numpy,
        "derived": lambda: view.numpy().T[2:, ::3].view(np.uint32),
        "torch": view.torch,
        "torch view": lambda: view.torch().t()[1:],
        "raw": view.raw,
        "slice of raw": lambda: view.raw()[5:].cast("B"),
        "slice": lambda: pack.get_slice("embed")[3:4].numpy(),
    }
    held = forms[form]()
    with pytest.raises(MappingInUse, match="'embed'") as caught:
        pack.close()
    assert caught.value.tensors == ("embed",)
    # Nothing was closed.
    assert torch.equal(pack["embed"].torch(), tensors()["embed"])
    assert torch.equal(pack["norm"].torch(), tensors()["norm"])
    del held
    pack.close()


def test_close_names_every_tensor_that_lives_and_no_other(path: Path) -> None:
    pack = stream_pack.open(path)
    held = [pack["step"].numpy(), pack["head"].torch(), pack["rows"].torch(), pack["embed"].torch()]
    pack["norm"].torch()
    with pytest.raises(MappingInUse) as caught:
        pack.close()
    assert caught.value.tensors == ("embed", "head", "rows", "step")
    del held
    pack.close()


@needs_proc
def test_leaving_a_with_block_never_raises_and_the_last_view_takes_the_mapping_with_it(path: Path) -> None:
    with stream_pack.open(path) as pack:
        array, tensor = pack["embed"].numpy(), pack["norm"].torch()
    assert open_descriptors(path) <= 2  # what the maps themselves hold
    with pytest.raises(StateError):
        pack["embed"]
    assert np.array_equal(array, tensors()["embed"].numpy())
    assert torch.equal(tensor, tensors()["norm"])
    pack.close()  # has nothing left to do
    del array
    assert set(mapped_file(path).permissions) == {"rw-p"}
    del tensor
    assert mapped_file(path).permissions == ()
    assert open_descriptors(path) == 0


def test_an_exception_inside_a_with_block_passes_unchanged(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), stream_pack.open(path) as pack:
        held = pack["embed"].numpy()
        raise ZeroDivisionError
    assert held.shape == (96, 32)


@needs_proc
def test_a_storage_goes_with_its_last_tensor_and_comes_back(path: Path) -> None:
    with stream_pack.open(path) as pack:
        first = pack["embed"].torch()
        first.fill_(3)
        del first
        # Copy-on-write pages belong to the mapping, so what was written is still there.
        assert pack["rows"].torch().eq(3).all()


def test_materialized_tensors_do_not_need_the_file(path: Path) -> None:
    # ST#577, ST#474
    with stream_pack.open(path) as pack:
        one = pack["embed"].materialize()
        copies = pack.materialize()
        shared = pack["embed"].torch()
        assert one.data_ptr() != shared.data_ptr()
        del shared
        pack.close()  # nothing lives: these are copies
    path.write_bytes(b"")
    path.unlink()
    assert torch.equal(one, tensors()["embed"])
    assert list(copies) == list(tensors())
    for name, tensor in tensors().items():
        assert torch.equal(copies[name], tensor)
    assert copies["embed"].data_ptr() == copies["head"].data_ptr()
    assert copies["rows"].untyped_storage()._cdata == copies["head"].untyped_storage()._cdata
    copies["norm"].add_(1)


def test_replacing_the_file_by_another_does_not_touch_an_open_pack(path: Path, tmp_path: Path) -> None:
    with stream_pack.open(path) as pack:
        pack_bytes(path, {"embed": torch.zeros(2)})
        assert torch.equal(pack["embed"].torch(), tensors()["embed"])
    with stream_pack.open(path) as pack:
        assert torch.equal(pack["embed"].torch(), torch.zeros(2))


def test_a_refused_private_mapping_falls_back_to_the_buffers_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ST#528: a system that promises no copy of so much memory
    real, refused, granted = mmap.mmap, [], []

    def stingy(fd: int, length: int, flags: int, prot: int, **options: int) -> mmap.mmap:
        if prot & mmap.PROT_WRITE and length > 30_000:
            refused.append(length)
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        if prot & mmap.PROT_WRITE:
            granted.append(length)
        return real(fd, length, flags, prot, **options)

    monkeypatch.setattr(mmap, "mmap", stingy)
    with stream_pack.open(path, verify="lazy") as pack:
        for name, tensor in tensors().items():
            assert torch.equal(pack[name].torch(), tensor)
        embed, head = pack["embed"].torch(), pack["head"].torch()
        assert embed.data_ptr() == head.data_ptr()
        with pytest.raises(MappingInUse):
            pack.close()
    assert len(refused) == 1
    assert max(granted) < 4096 + 96 * 32 * 4


def test_another_refusal_is_the_systems_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mmap.mmap

    def broken(fd: int, length: int, flags: int, prot: int, **options: int) -> mmap.mmap:
        if prot & mmap.PROT_WRITE:
            raise OSError(errno.EPERM, "Operation not permitted")
        return real(fd, length, flags, prot, **options)

    monkeypatch.setattr(mmap, "mmap", broken)
    with stream_pack.open(path) as pack, pytest.raises(PermissionError):
        pack["embed"].torch()


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [
        ("linux", "x86_64", 0x4000),
        ("linux", "aarch64", 0x4000),
        ("linux", "mips64", 0x400),
        ("linux", "ppc64le", 0x40),
        ("linux", "sparc64", 0x40),
        ("linux", "alpha", 0x10000),
        ("darwin", "arm64", 0x40),
    ],
)
def test_the_constant_that_python_lacks_is_the_platforms(
    system: str, machine: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Linux 6.x, arch/*/include/uapi/asm/mman.h; XNU, bsd/sys/mman.h
    monkeypatch.delattr(mmap, "MAP_NORESERVE", raising=False)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert mapping_module._map_noreserve() == expected


def test_a_pack_travels_to_another_process_by_its_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    pack = stream_pack.open(path.name, verify="lazy")
    again = pickle.loads(pickle.dumps(pack))
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(again)).path == str(path)
    assert torch.equal(again["embed"].torch(), tensors()["embed"])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(checksum_of, (pack, "embed")) == checksum_of(pack, "embed")


def checksum_of(pack: stream_pack.Pack, name: str) -> float:
    return float(pack[name].numpy().sum(dtype=np.float64))


def test_a_pack_that_changed_meanwhile_does_not_travel(path: Path) -> None:
    pickled = pickle.dumps(stream_pack.open(path))
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))
    with pytest.raises(StateError, match="changed or replaced"):
        pickle.loads(pickled)


def test_a_forked_child_reads_and_writes_its_own_copy(path: Path) -> None:
    program = """
import os, sys, stream_pack
with stream_pack.open(sys.argv[1]) as pack:
    tensor, array = pack["norm"].torch(), pack["step"].numpy()
    child = os.fork()
    if child == 0:
        tensor.zero_()
        os._exit(0 if int(array) == 7 and not tensor.any() and int(pack["step"].torch()) == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.any()
"""
    subprocess.run([sys.executable, "-c", program, path], check=True)


def test_errors_survive_the_way_back_from_a_worker(path: Path) -> None:
    pack = stream_pack.open(path)
    held = pack["embed"].numpy()
    with pytest.raises(MappingInUse) as caught:
        pack.close()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, MappingInUse)
    assert (str(copy), copy.tensors) == (str(caught.value), ("embed",))
    assert held.shape == (96, 32)


def test_a_tensor_that_was_sent_to_another_process_can_be_asked_for_again(path: Path) -> None:
    # torch.multiprocessing does this to whatever is put into a queue: the storage stays, its memory is another.
    pack = stream_pack.open(path)
    sent = pack["embed"].torch()
    sent.share_memory_()  # type: ignore[no-untyped-call]
    for name in ("embed", "head", "rows"):
        again = pack[name].torch()
        assert torch.equal(again, tensors()[name])
        assert again.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr()
    norm = pack["norm"].torch()
    with pytest.raises(MappingInUse) as caught:
        pack.close()
    assert caught.value.tensors == ("norm",)  # what was sent holds no memory of the file
    del norm
    pack.close()
    assert torch.equal(sent, tensors()["embed"])


def test_a_buffer_lent_anew_is_known_by_its_new_users_only(path: Path) -> None:
    pack = stream_pack.open(path)
    pack["embed"].torch().share_memory_()  # type: ignore[no-untyped-call]
    held = pack["head"].torch()
    with pytest.raises(MappingInUse) as caught:
        pack.close()
    assert caught.value.tensors == ("head",)
    del held
    pack.close()


def test_a_pack_left_during_its_verification_ends_that(path: Path) -> None:
    # 2 x 1024 blocks: so many are hashed in one go.
    pack_bytes(path, {"w": torch.zeros(2 * 1024 * BLOCK_NBYTES, dtype=torch.uint8)})
    done: list[int] = []
    pack = stream_pack.open(path)

    def leave(nbytes: int, total: int) -> None:
        done.append(nbytes)
        pack.close()  # as another thread might, at that moment: verifying uses no memory of the mapping

    with pytest.raises(StateError, match="is closed: open it again"):
        pack.verify(jobs=1, progress=leave)
    assert done == [1024 * BLOCK_NBYTES]


@pytest.mark.parametrize("verify", ["never", "lazy"])
def test_reading_while_another_thread_leaves_the_with_block_is_a_state_error(path: Path, verify: str) -> None:
    wrong: set[str] = set()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet everywhere
    try:
        for turn in range(60):
            pack = stream_pack.open(path, verify=verify)  # type: ignore[arg-type]
            started = threading.Event()

            def read(pack: stream_pack.Pack = pack, started: threading.Event = started) -> None:
                started.set()
                try:
                    while True:
                        pack["step"].numpy()
                        pack["embed"].torch()
                        pack["norm"].numpy(writable=True)
                        pack.memory(0, 1, tensors=())
                        pack.verify(jobs=1)
                except StateError:
                    pass
                except BaseException as error:
                    wrong.add(repr(error))

            thread = threading.Thread(target=read)
            thread.start()
            started.wait()
            while turn % 2 and not pack._lender.closed:
                try:
                    pack.close()
                except MappingInUse:
                    pass
            pack.__exit__(None, None, None)
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == set()


def doors(pack: stream_pack.Pack, opened: stream_pack.SafeOpen) -> dict[str, Callable[[], object]]:
    """Every call that hands out memory of a pack, or reads it."""
    view = pack["embed"]
    return {
        "numpy": view.numpy,
        "writable numpy": lambda: view.numpy(writable=True),
        "array": lambda: np.asarray(view),
        "torch": view.torch,
        "raw": view.raw,
        "materialize": view.materialize,
        "the pack's materialize": pack.materialize,
        "slice as array": lambda: view[1].numpy(),
        "slice as tensor": lambda: pack.get_slice("embed")[1:3].torch(),
        "memory": lambda: pack.memory(0, 10, tensors=()),
        "safe_open": lambda: opened.get_tensor("embed"),
        "safe_open's slice": lambda: opened.get_slice("embed")[0:2],
        "safe_open's tensors": lambda: opened.get_tensors(["embed"]),
    }


@pytest.mark.parametrize("verify", ["never", "lazy"])
@pytest.mark.parametrize("held", [False, True], ids=["first use", "in use"])
def test_no_door_hands_out_memory_of_a_file_that_was_cut(path: Path, verify: str, held: bool) -> None:
    whole = path.read_bytes()
    for cut in (len(whole) - 1, 100, 0):
        path.write_bytes(whole)
        pack = stream_pack.open(path, verify=verify)  # type: ignore[arg-type]
        opened = stream_pack.safe_open(path)
        in_use = [use() for use in doors(pack, opened).values()] if held else []
        os.truncate(path, cut)
        for door, use in doors(pack, opened).items():
            with pytest.raises(TruncatedError, match="was truncated while it was open") as caught:
                use()
            assert str(path) in str(caught.value), door
            assert (caught.value.expected_nbytes, caught.value.actual_nbytes) == (len(whole), cut)
        del in_use, pack, opened


def test_a_file_that_was_cut_before_it_is_loaded_is_truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)
    for names in (None, ["step"]):
        with pytest.raises(TruncatedError):
            stream_pack.load_file(path, names=names)


def sum_of(view: stream_pack.View) -> float:
    return float(view.torch().double().sum())


def test_views_travel_to_other_processes_as_place_and_not_as_bytes(path: Path) -> None:
    with stream_pack.open(path) as pack:
        views = [pack["embed"], pack["embed"][3:5], pack["none"], pack["norm"]]
        pickled = pickle.dumps(views)
        assert len(pickled) < 2000
        for view, again in zip(views, pickle.loads(pickled), strict=True):
            assert repr(again) == repr(view)
            assert torch.equal(again.torch(), view.torch())
        (part,) = pickle.loads(pickle.dumps([pack.get_slice("embed")]))
        assert torch.equal(part[0].torch(), pack["embed"].torch()[0])
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # as the workers of a DataLoader may be
            assert pool.map(sum_of, views) == [sum_of(view) for view in views]


def descriptors_of(path: Path) -> int:
    """How many descriptors of this process are of the file."""
    return sum(os.path.samefile(entry, path) for entry in Path("/proc/self/fd").iterdir() if entry.exists())


@needs_proc
def test_views_in_one_pickle_share_one_open_file(path: Path) -> None:
    pack = stream_pack.open(path)
    pickled = pickle.dumps((pack, *pack.values()))
    again, *views = pickle.loads(pickled)
    assert descriptors_of(path) == 2
    assert torch.equal(views[0].torch(), pack["embed"].torch())
    again.__exit__(None, None, None)
    with pytest.raises(StateError):
        views[0].torch()


def test_a_view_of_a_file_that_was_replaced_is_not_one_of_the_new_file(path: Path) -> None:
    with stream_pack.open(path) as pack:
        pickled = pickle.dumps(pack["embed"])
    os.utime(path, (1, 1))
    with pytest.raises(StateError, match="was changed or replaced"):
        pickle.loads(pickled)


@needs_proc
def test_hundreds_of_open_packs_take_one_descriptor_each(path: Path) -> None:
    packs = [stream_pack.open(path) for _ in range(300)]
    assert descriptors_of(path) == 300
    arrays = [pack["embed"].numpy() for pack in packs]
    # Python's maps keep a descriptor of their own until 3.13.
    assert descriptors_of(path) == (300 if sys.version_info >= (3, 13) else 600)
    del arrays, packs
    assert descriptors_of(path) == 0


@pytest.mark.parametrize("end", ["with", "close"])
def test_what_is_left_of_a_closed_pack_uses_neither_memory_nor_descriptor(path: Path, end: str) -> None:
    # What a thread holds that looked the memory up before another one closed it.
    pack = stream_pack.open(path)
    mapping = pack._lender.mapping
    if end == "with":
        pack.__exit__(None, None, None)
    else:
        pack.close()
    uses: tuple[Callable[[], object], ...] = (
        lambda: mapping.array(0, 1),
        lambda: mapping.writable_array(0, 1),
        lambda: mapping.file.read(0, 1),
        mapping.check_length,
    )
    for use in uses:
        with pytest.raises(StateError, match="is closed: open it again"):
            use()


def test_a_finalizer_may_close_a_pack_that_is_being_read(path: Path) -> None:
    # Garbage is collected wherever memory is allocated, also while the pack lends some.
    pack = stream_pack.open(path)
    mapping = pack._lender.mapping
    with mapping.file.descriptor():
        pack.close()  # with a lock that is not reentrant, this would wait for itself
    with pytest.raises(StateError):
        mapping.file.read(0, 1)


@needs_proc
@pytest.mark.parametrize("writable", [False, True])
def test_a_mapping_refuses_to_close_while_an_array_of_either_map_is_alive(path: Path, writable: bool) -> None:
    mapping = Mapping(FileRange(path, offset=0, nbytes=None), path.stat().st_size)
    array = (mapping.writable_array if writable else mapping.array)(0, 10)
    with pytest.raises(MappingInUse):
        mapping.close()
    assert array[4:8].tobytes() == b"MP00"
    del array
    mapping.close()
    assert str(path) not in Path("/proc/self/maps").read_text()
    with pytest.raises(StateError):
        mapping.array(0, 1)
