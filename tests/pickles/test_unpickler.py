"""The pickle machine on harmless pickles: against the interpreter's own."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_pack.errors import TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.pickles import unpickler
from stream_pack.pickles.unpickler import Callee, OddKey, Opaque, Unpickler

KEYS = st.text(max_size=8) | st.integers(-(2**40), 2**40) | st.none() | st.binary(max_size=4)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**900), 2**900)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=()), max_size=300)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(KEYS, inner, max_size=5)
    ),
    max_leaves=20,
)


def pieces(data: bytes, step: int) -> Callable[[], bytes]:
    cut = (data[begin : begin + step] for begin in range(0, len(data), step))
    return lambda: next(cut, b"")


def load(data: bytes, *, step: int = 65536) -> object:
    return machine(data, step=step).load()


def machine(data: bytes, *, step: int = 65536, find_global: Callable[[str], object] = Opaque) -> Unpickler:
    return Unpickler(pieces(data, step), find_global=find_global, find_persistent=lambda pid: pid)


@given(VALUES, st.sampled_from([2, 3, 4, 5]), st.sampled_from([1, 7, 65536]))
def test_plain_values_come_out_as_the_interpreter_reads_them(value: object, protocol: int, step: int) -> None:
    # Below protocol 3 bytes are pickled as a call, which is no plain value here.
    data = pickle.dumps(value, protocol)
    if b"_codecs" in data or b"__builtin__" in data:
        return
    assert load(data, step=step) == value


def test_protocol_1_writes_numbers_and_booleans_as_text() -> None:
    value = [True, False, 1, -1, 255, 70_000, 2**31, -(2**70), 1.5, None, "a", (1, 2, 3, 4)]
    assert load(pickle.dumps(value, 1)) == value


def test_an_object_met_twice_is_the_same_object_twice() -> None:
    shared: list[int] = [1]
    value = load(pickle.dumps([shared, shared], 2))
    assert isinstance(value, list)
    assert value[0] is value[1]


def test_a_list_that_holds_itself_is_read() -> None:
    endless: list[object] = []
    endless.append(endless)
    value = load(pickle.dumps(endless, 4))
    assert isinstance(value, list)
    assert value[0] is value


def test_text_of_python_2_is_text_and_its_binary_strings_are_bytes() -> None:
    assert load(b"(U\x05helloU\x02\xff\xfeT\x02\0\0\0hit.") == ("hello", b"\xff\xfe", "hi")


def test_what_follows_the_pickle_is_given_back() -> None:
    data = pickle.dumps({"a": [1, 2]}, 2)
    for step in (1, 5, 1000):
        found = machine(data + b"PK\7\10and more", step=step)
        assert found.load() == {"a": [1, 2]}
        assert found.nbytes == len(data)
        assert (b"PK\7\10and more").startswith(found.rest)
        assert step == 1000 or len(found.rest) < step


def test_names_are_looked_up_and_never_imported() -> None:
    asked: list[str] = []

    def find(name: str) -> object:
        asked.append(name)
        return Callee(name, lambda *args: ("called", *args))

    data = b"cos\nsystem\n(X\x04\0\0\0true\x85tR."  # the arguments are ((“true”,),)
    assert machine(data, find_global=find).load() == ("called", ("true",))
    assert asked == ["os.system"]


def test_an_opaque_keeps_everything_that_would_have_gone_into_it() -> None:
    data = (
        b"\x80\x04cm\nC\n(K\x01tR"  # C(1)
        b"K\x02a(K\x03K\x04e"  # append, extend
        b"X\1\0\0\0kK\x05s"  # set an item
        b"}b."  # set its state
    )
    value = load(data)
    assert isinstance(value, Opaque)
    assert value.name == "m.C"
    assert value.parts == [(1,), 2, 3, 4, "k", 5, {}]


def test_newobj_with_keywords_makes_an_opaque_of_a_class_only() -> None:
    value = load(b"\x80\x04cm\nC\n)}\x92.")
    assert isinstance(value, Opaque)
    with pytest.raises(UnsupportedCheckpointError, match="not a class"):
        load(b"\x80\x04K\x01)}\x92.")


def test_keys_that_could_be_made_to_collide_are_not_hashed() -> None:
    data = pickle.dumps({(1, (2, 3)): 1, 2**61 - 1: 2, 2**62: 3, "a": 4, 5: 6}, 2)
    value = load(data)
    assert isinstance(value, dict)
    assert sum(isinstance(key, OddKey) for key in value) == 3
    assert value["a"] == 4
    assert value[5] == 6


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_cut_at_every_byte_a_pickle_is_truncated(protocol: int) -> None:
    data = pickle.dumps({"name": (1, 2.5, "text", [None] * 3), "b": b"x" * 300}, protocol)
    for end in range(len(data)):
        with pytest.raises(TruncatedSourceError, match="before its STOP"):
            load(data[:end])


MALFORMED = {
    "nothing on the stack": b".",
    "more than one value": b"NN.",
    "a mark left open": b"(N.",
    "a mark that is not there": b"Nt.",
    "pop of nothing": b"0.",
    "memo miss": b"h\x05.",
    "memo of nothing": b"q\0.",
    "append to a dict": b"}Na.",
    "item of a list": b"]NNs.",
    "a key without a value": b"}(Nu.",
    "a list as a key": b"}]Ns.",
    "call of a string": b"X\1\0\0\0a)R.",
    "arguments that are no tuple": b"cm\nn\nNR.",
    "state of a number": b"K\1}b.",
    "state of a list": b"]}b.",
    "global without a name": b"NN\x93.",
    "extension registry": b"\x82\1.",
    "protocol 0 string": b"S'a'\n.",
    "instance of python 2": b"(cm\nn\no.",
    "next buffer": b"\x97.",
    "unknown opcode": b"\xff.",
    "text that is not utf-8": b"X\1\0\0\0\xff.",
    "number that is none": b"Iabc\n.",
    "number with underscores": b"I1_0\n.",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("step", [1, 65536])
def test_a_malformed_pickle_is_refused_as_damaged(data: bytes, step: int) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="damaged or hostile"):
        load(data, step=step)


def test_a_protocol_of_the_future_is_named() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="protocol 6"):
        load(b"\x80\x06N.")


LIMITS = {
    "string": (b"X\xff\xff\xff\xff", "a string of 4294967295 bytes"),
    "bytes": (b"\x8e" + b"\xff" * 8, "a string of 18446744073709551615 bytes"),
    "integer": (b"\x8b\xff\xff\xff\x7f", "an integer of 2147483647 bytes"),
    "digits": (b"L" + b"9" * 2000 + b"L\n.", "where a number was expected"),
    "line": (b"c" + b"a" * 70_000, "a line of more than"),
    "marks": (b"(" * 200_000 + b".", "nested more than"),
    "long global": (b"\x8d" + (5000).to_bytes(8, "little") + b"a" * 5000 + b"\x8c\1b\x93.", "name"),
}


@pytest.mark.parametrize(("data", "message"), LIMITS.values(), ids=LIMITS)
def test_a_limit_is_an_error_before_anything_is_allocated(data: bytes, message: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=message):
        load(data)


@pytest.mark.parametrize(
    ("limit", "value", "data"),
    [
        ("MAX_STACK", 1000, b"N" * 200_000),
        ("MAX_OBJECTS", 1000, b"}0" * 100_000),
        ("MAX_OBJECTS", 1000, b"N" + b"\x94" * 200_000),
        ("MAX_OBJECTS", 1000, b")" + b"\x85" * 200_000),
        ("MAX_OBJECTS", 1000, b"X\0\0\0\x000" * 100_000),
        ("MAX_NBYTES", 100_000, b"N0" * 100_000),
    ],
    ids=["stack", "dicts", "memo", "tuples", "strings", "bytes"],
)
def test_the_sum_of_many_small_things_is_limited_too(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int, data: bytes
) -> None:
    monkeypatch.setattr(unpickler, limit, value)
    with pytest.raises(UnsupportedCheckpointError, match=str(value)):
        load(data + b".")


def test_values_nested_ten_thousand_deep_neither_recurse_nor_crash() -> None:
    for data in (b")" + b"\x85" * 10_000 + b".", b"]" * 10_001 + b"a" * 10_000 + b"."):
        found, depth = load(data), 0
        while isinstance(found, (tuple, list)) and found:
            (found,) = found
            depth += 1
        assert (depth, len(found)) == (10_000, 0)  # type: ignore[arg-type]
    keyed = load(b"}" + b")" + b"\x85" * 10_000 + b"Ns.")
    assert isinstance(keyed, dict)
    assert list(keyed.values()) == [None]
