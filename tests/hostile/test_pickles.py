"""Pickles made to harm: none may run, import, hang, or take memory; all end in one kind of error."""

from __future__ import annotations

import gc
import os
import pickle
import random
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from stream_pack.errors import LimitError, SourceError, UnsupportedCheckpointError, UnsupportedTensorError
from stream_pack.pickles.globals import TorchObjects
from stream_pack.pickles.unpickler import STEP_NBYTES, Unpickler
from stream_pack.sources.torch_save.zip import TorchZipSource
from tests.sources.byte_sources import pipe_stream
from tests.sources.source_suite import collect, options, requests_for
from tests.support.damage import UNREADABLE, Share, may_refuse, some_or_all
from tests.support.taking import taken
from tests.support.torch_zips import records, repacked, saved

MIB = 1 << 20


def with_pickle(data: bytes, storage: bytes = bytes(40)) -> bytes:
    """A checkpoint whose pickle is ``data``, with one storage of 40 bytes."""
    parts = records(saved({"w": torch.zeros(10)}))
    return repacked(parts | {"data.pkl": data, "data/0": storage})


def open_pickle(data: bytes) -> TorchZipSource:
    return taken(TorchZipSource(pipe_stream(with_pickle(data), step=65536)))


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def storage(numel: int = 10, *, kind: str = "FloatStorage", key: str = "0") -> bytes:
    return (
        b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(numel) + b"tQ"
    )  # fmt: skip


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    *, numel: int = 10, offset: int = 0, shape: tuple[int, ...] = (10,), strides: tuple[int, ...] = (1,)
) -> bytes:
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage(numel) + number(offset) + numbers(shape) + numbers(strides)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )  # fmt: skip


def state_dict(*items: bytes) -> bytes:
    """A pickle of {"w": item, ...}."""
    return b"\x80\x02}" + b"".join(text(f"w{k}") + item + b"s" for k, item in enumerate(items)) + b"."


def test_the_tools_of_this_file_make_a_checkpoint_that_is_read() -> None:
    source = open_pickle(state_dict(tensor()))
    _, requests = requests_for(source.catalog)
    assert collect(source, requests, options()) == [bytes(40)]


class Run:
    def __init__(self, function: Any, *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_a_call_of_os_system_is_named_and_not_made(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "executed"
    value = {"w": torch.ones(1), "evil": Run(os.system, f"touch {marker}")}
    with pytest.raises(UnsupportedCheckpointError, match=r"posix\.system"):
        taken(TorchZipSource(pipe_stream(saved(value, pickle_protocol=protocol))))
    assert not marker.exists()


CALLS = {
    "reduce": b"cposix\nsystem\n" + text("true") + b"\x85R",
    "newobj": b"cposix\nsystem\n" + text("true") + b"\x85\x81",
    "newobj_ex": b"cposix\nsystem\n" + text("true") + b"\x85}\x92",
    "stack_global": text("posix") + text("system") + b"\x93" + text("true") + b"\x85R",
    "only named": b"cposix\nsystem\n",
    "as a key": b"}cposix\nsystem\nNs",
    "in a known type": b"ccollections\ndefaultdict\ncposix\nsystem\n\x85R",
    "as a state": b"ctorch\nSize\n)Rcposix\nsystem\n\x86",
    "as a subclass": b"ctorch._tensor\n_rebuild_from_type_v2\n(cposix\nsystem\ncposix\nsystem\n)NtR",
    "as hooks": tensor().replace(b"ccollections\nOrderedDict\n)R", b"cposix\nsystem\n)R"),
    "build": b"cposix\nsystem\n" + text("true") + b"b",
    "thrown away": b"cposix\nsystem\n" + text("true") + b"\x85R0N",
}


@pytest.mark.parametrize("value", CALLS.values(), ids=CALLS)
def test_every_way_to_name_a_function_ends_in_its_name(value: bytes) -> None:
    before = set(sys.modules)
    try:  # refused where a value holds it, else mentioned
        said = " ".join(open_pickle(state_dict(value, tensor())).traits.remarks)
    except (UnsupportedCheckpointError, UnsupportedTensorError) as error:
        said = str(error)
    assert "'posix.system'" in said
    assert set(sys.modules) == before


def test_modules_that_are_named_are_not_imported() -> None:
    for module in ("antigravity", "this", "turtle", "torch.hub"):
        present = module in sys.modules
        with pytest.raises(UnsupportedCheckpointError, match=module):
            open_pickle(state_dict(f"c{module}\nload\n".encode() + text("x") + b"\x85R"))
        assert (module in sys.modules) == present


def test_all_unknown_names_are_listed_up_to_five() -> None:
    data = state_dict(*(f"cevil\nname{k}\n".encode() for k in range(30)))
    with pytest.raises(UnsupportedCheckpointError, match=r"'evil\.name0', .*'evil\.name4' and 25 more"):
        open_pickle(data)


def test_a_tensor_made_by_a_function_that_torch_may_get_one_day_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match=r"_rebuild_tensor_v9', which this version"):
        open_pickle(state_dict(tensor().replace(b"tensor_v2", b"tensor_v9")))


GEOMETRY = {
    "shape beyond the storage": tensor(shape=(11,)),
    "offset beyond the storage": tensor(offset=1),
    "stride beyond the storage": tensor(strides=(2,)),
    "negative offset": tensor(offset=-1),
    "negative dim": tensor(shape=(-10,)),
    "two negative dims": tensor(shape=(-2, -5), strides=(5, 1)),
    "negative stride": tensor(offset=9, strides=(-1,)),
    "huge shape": tensor(shape=(2**62,)),
    "huge stride": tensor(shape=(2,), strides=(2**62,)),
    "huge offset": tensor(offset=2**62),
    "huge product": tensor(shape=(2**32, 2**32), strides=(0, 0)),
    "astronomic product": tensor(shape=(2**62,) * 64, strides=(0,) * 64),
    "huge storage": tensor(numel=2**62, shape=(2**62,)),
    "storage beyond 64 bits": tensor(numel=2**80),
    "negative storage": tensor(numel=-1),
    "too few strides": tensor(strides=()),
    "too many dims": tensor(shape=(1,) * 300, strides=(1,) * 300),
    "two lengths": tensor() + b"0" + tensor(numel=5, shape=(5,)),
}


@pytest.mark.parametrize("value", GEOMETRY.values(), ids=GEOMETRY)
def test_a_tensor_outside_its_storage_is_refused_before_anything_is_read(value: bytes) -> None:
    with pytest.raises((SourceError, LimitError)):
        open_pickle(state_dict(value))


def test_a_storage_longer_than_its_record_is_refused_while_reading() -> None:
    source = open_pickle(state_dict(tensor(numel=2**60, shape=(10,))))
    _, requests = requests_for(source.catalog)
    with pytest.raises(SourceError):
        collect(source, requests, options())


def test_a_storage_longer_than_its_file_is_refused_at_once(tmp_path: Path) -> None:
    from tests.sources.byte_sources import file_stream

    data = with_pickle(state_dict(tensor(numel=2**40, shape=(10,))))
    with pytest.raises(SourceError, match="cut short"):
        TorchZipSource(file_stream(data, tmp_path))


TORCH = b"ctorch._utils\n"
WRONG = {
    "items of a tensor": tensor() + b"NNs",
    "append to a tensor": tensor() + b"Na",
    "state of a tensor": tensor() + b"}b",
    "state of a global": b"ctorch\nSize\n}b",
    "call of a tensor": tensor() + b")R",
    "call of a storage": storage() + b")R",
    "storage of the wrong kind": storage(kind="Size"),
    "storage of a number": b"(" + text("storage") + b"K\1" + text("0") + text("cpu") + b"K\1tQ",
    "storage with a list as key": b"(" + text("storage") + b"ctorch\nFloatStorage\n]" + text("c") + b"K\1tQ",
    "persistent id of a number": b"K\1Q",
    "persistent id of a list": b"]Q",
    "persistent module": b"(" + text("module") + b"NNNtQ",
    "view metadata": storage()[:-2] + b"K\1tQ",
    "tensor of nothing": TORCH + b"_rebuild_tensor_v2\n)R",
    "tensor of too much": TORCH + b"_rebuild_tensor_v2\n(NNNNNNNNNNtR",
    "tensor of no storage": TORCH + b"_rebuild_tensor_v2\n(NK\0))\x89}tR",
    "tensor of text": tensor().replace(numbers((10,)), text("10")),
    "tensor of booleans": tensor().replace(numbers((10,)), b"\x88\x85"),
    "tensor of floats": tensor().replace(numbers((10,)), b"G" + bytes(8) + b"\x85"),
    "tensor of a list": tensor().replace(numbers((10,)), b"]"),
    "metadata of text": tensor()[:-2] + text("conj") + b"tR",
    "metadata of the wrong bits": tensor()[:-2] + b"}" + text("x") + b"\x88stR",
    "metadata of numbers": tensor()[:-2] + b"}" + text("conj") + b"K\1stR",
    "conj of floats": tensor()[:-2] + b"}" + text("conj") + b"\x88stR",
    "dtype of text": TORCH + b"_rebuild_tensor_v3\n(" + storage() + b"K\0))\x89}" + text("float32") + b"tR",
    "parameter of nothing": TORCH + b"_rebuild_parameter\n(NN)tR",
    "parameter of a dict": TORCH + b"_rebuild_parameter\n(}\x88}tR",
    "type of nothing": b"ctorch._tensor\n_rebuild_from_type_v2\n(Nctorch\nTensor\n)NtR",
    "type of itself": b"ctorch._tensor\n_rebuild_from_type_v2\n("
    b"ctorch._tensor\n_rebuild_from_type_v2\nctorch\nTensor\n)NtR",
    "ordered dict of numbers": b"ccollections\nOrderedDict\nK\1\x85R",
    "ordered dict of lists": b"ccollections\nOrderedDict\n]]a\x85R",
    "memo miss": b"h\xff",
    "huge memo miss": b"j\xff\xff\xff\xff",
    "stack underflow": b"000000",
    "extension": b"\x82\1",
    "unhashable key": b"}]Ns",
    "huge string": b"X\xff\xff\xff\xff",
    "huge long": b"\x8b\xff\xff\xff\x7f",
    "negative long": b"\x8b\xff\xff\xff\xff",
    "huge bytes": b"\x8e" + b"\xff" * 8,
}  # fmt: skip


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
def test_nonsense_is_refused(value: bytes) -> None:
    with pytest.raises(SourceError):
        open_pickle(state_dict(value))


def test_a_memo_index_of_four_billion_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        source = open_pickle(state_dict(b"Nr\xff\xff\xff\xff0j\xff\xff\xff\xff", tensor()))
        assert len(source.catalog) == 1
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def shared_twice(levels: int) -> bytes:
    """A tuple whose parts are shared: 2 ** levels leaves for whoever walks it as a tree."""
    return b")" + b"q\1h\1\x86" * levels


DEEP = {
    "tuples": b")" + b"\x85" * 9_000,
    "lists": b"]" * 9_000 + b"a" * 8_999,
    "dicts": (b"}" + text("a")) * 9_000 + b"N" + b"s" * 9_000,
    "a key": b"}" + b")" + b"\x85" * 9_000 + b"Ns",
    "an object": b"ctorch\nSize\n)R" + b"\x85" * 9_000,
    "bombs of tuples": shared_twice(200),
    "a bomb as a key": b"}" + shared_twice(200) + b"Ns",
    "ordered dicts": (b"ccollections\nOrderedDict\n)R" + text("a")) * 9_000 + b"N" + b"s" * 9_000,
}


@pytest.mark.parametrize("value", DEEP.values(), ids=DEEP)
def test_deep_or_exponential_nesting_neither_recurses_nor_hangs(value: bytes) -> None:
    source = open_pickle(state_dict(value, tensor()))
    assert source.ignored == 1
    assert len(source.catalog) == 1
    del source
    gc.collect()


MILLION = 1_000_000
ENDLESS = {
    "lists": b"]" * MILLION + b"a" * (MILLION - 1),
    "lists with a memo": b"".join(b"]r" + struct.pack("<I", k) for k in range(MILLION)) + b"a" * (MILLION - 1),
    "dicts": (b"}" + text("a")) * MILLION + b"N" + b"s" * MILLION,
    "tuples": b")" + b"\x85" * MILLION,
    "pairs, the inner one first": b")" + b"N\x86" * MILLION,
    "pairs, the inner one last": b")q\1" + b"0Nh\1\x86q\1" * MILLION,
    "marks": b"(" * MILLION + b"t" * MILLION,
    "lists put into the next by the memo": b"]q\1" + b"]h\1aq\1" * MILLION,
    "dicts put into the next by the memo": b"}q\1" + (b"}" + text("a") + b"h\1sq\1") * MILLION,
    "objects": b"cm\nX\n" * MILLION + b"b" * (MILLION - 1),
    "objects called with the one before": b"N" + b"\x85q\1" + b"0cm\nX\nh\1R\x85q\1" * MILLION,
    "sets": b"\x8f" * MILLION + b"(N\x90" + b"0" * (MILLION - 1),
}


@pytest.mark.parametrize("value", ENDLESS.values(), ids=ENDLESS)
def test_values_nested_a_million_deep_are_refused_before_they_take_time_or_memory(value: bytes) -> None:
    read = 0

    def read_some() -> bytes:
        nonlocal read
        read += STEP_NBYTES
        return data[read - STEP_NBYTES : read]

    for data in (state_dict(value), value + b"."):
        read = 0
        found = TorchObjects()
        tracemalloc.start()
        try:
            with pytest.raises(UnsupportedCheckpointError, match="deep|containers wait"):
                Unpickler(read_some, find_global=found.find_global, find_persistent=found.find_persistent).load()
            assert tracemalloc.get_traced_memory()[1] < 40 * MIB
        finally:
            tracemalloc.stop()
        assert read < len(data) / 5


def test_a_cycle_is_not_taken_for_endless_nesting() -> None:
    parent = b"cm\nX\n)Rq\1}(" + text("child") + b"cm\nX\n)R}" + text("parent") + b"h\1sb"
    values = parent + b"".join(text(f"k{k}") + b"N" for k in range(20_000)) + text("again") + b"h\1ub"
    with pytest.raises(UnsupportedCheckpointError, match="names 'm.X'"):
        open_pickle(state_dict(values, tensor()))


def test_a_big_value_under_many_keys_is_looked_through_once() -> None:
    big = b"](" + b"]" * 90_000 + b"e"
    shared = b"".join(text(f"k{k}") + b"h\1\x85s" for k in range(50_000))  # looked through each time: hours
    source = open_pickle(state_dict(big + b"q\1", tensor())[:-1] + shared + b".")
    assert source.ignored == 50_001


def test_deep_nesting_around_a_tensor_is_found() -> None:
    data = state_dict(tensor() + b"\x85" * 9_000)
    with pytest.raises(UnsupportedCheckpointError, match="nested below 'w0'"):
        open_pickle(data)


def test_types_with_attributes_nested_without_end_are_refused() -> None:
    kind = b"ctorch._tensor\n_rebuild_from_type_v2\n"
    plain = tensor().removesuffix(b"R")  # the function and its arguments
    opening = b"(" + kind + b"ctorch\nTensor\n"
    innermost = b"(" + plain.replace(b"_v2\n", b"_v2\nctorch\nTensor\n") + b"Nt"
    assert len(open_pickle(state_dict(kind + innermost + b"R")).catalog) == 1
    for depth in (1, 5000):
        nested = kind + opening * depth + innermost + b"Nt" * depth + b"R"
        with pytest.raises(SourceError, match="with attributes"):
            open_pickle(state_dict(nested))


def test_two_hundred_thousand_marks_are_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="deep"):
        open_pickle(state_dict(b"(" * 200_000))


def test_integers_chosen_to_collide_do_not_slow_the_dict() -> None:
    prime = 2**61 - 1  # Python's hash of integers is the remainder by it
    items = b"".join(number(k * prime) + b"N" for k in range(1, 50_000))
    source = open_pickle(state_dict(b"}(" + items + b"u", tensor()))
    assert source.ignored == 1


def test_a_message_stays_short_whatever_the_file_names() -> None:
    for value in (
        f"c{'m' * 2000}\n{'n' * 2000}\n".encode(),
        b"}" + text("k" * 100_000) + tensor() + b"s",
        b"}" + number(2**900) + tensor() + b"s",
    ):
        with pytest.raises(SourceError) as caught:
            open_pickle(state_dict(value))
        assert len(str(caught.value)) < 5000
    many = b"".join(text(f"{k:>5}" * 1000) + b"}" + text("a") + tensor() + b"ss" for k in range(50))
    with pytest.raises(SourceError) as caught:
        open_pickle(b"\x80\x02}" + many + b".")
    assert len(str(caught.value)) < 10_000


SEEDS = [
    state_dict(tensor(), storage(), b"ctorch\nSize\n)R", text("abc"), number(2**70)),
    records(saved({"a": torch.ones(10), "p": torch.nn.Parameter(torch.ones(10)), "x": {1, 2}}))["data.pkl"],
    records(saved({"a": torch.ones(10, dtype=torch.uint32), "c": {"d": [b"x"]}}, pickle_protocol=4))[
        "data.pkl"
    ],
    pickle.dumps({"a": [1, 2.0, "b", (None, True)]}, 5),
]  # fmt: skip


@some_or_all(10)
@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_pickles_with_random_damage_end_in_our_errors_only(seed: int, share: Share) -> None:
    """PT#127525: torch's own restricted unpickler leaks IndexError, KeyError and struct.error here."""
    draw = random.Random(seed)
    original = SEEDS[seed]
    opcodes = b"(.012GIJKLMNQRTUX]abcdehjlqrstu})\x80\x81\x85\x86\x87\x88\x8a\x8b\x8c\x8e\x8f\x90\x93\x94\x95"
    for _ in range(2500 // share.one_of):
        data = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            kind = draw.randrange(4)
            if kind == 0:
                data[at] = draw.randrange(256)
            elif kind == 1:
                data[at] = draw.choice(opcodes)
            elif kind == 2:
                data[at:at] = bytes([draw.choice(opcodes)])
            else:
                del data[at : at + draw.randint(1, 4)]
        with may_refuse(*UNREADABLE):
            source = open_pickle(bytes(data))
            _, requests = requests_for(source.catalog)
            if requests.nbytes.sum() < MIB:
                collect(source, requests, options())
