"""Which of a checkpoint's nested dicts is packed, and what its tensors are called."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tracemalloc
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import stream_pack
from stream_pack.cli import main
from stream_pack.errors import LimitError, OptionError, UnsupportedCheckpointError, UnsupportedTensorError
from stream_pack.pickles.contents import name_of
from stream_pack.pickles.nesting import Key
from stream_pack.pipeline.source import Source
from stream_pack.sources.open import open_source
from tests.hostile.test_pickles import shared_twice, tensor, with_pickle
from tests.sources.source_suite import collect, options, requests_for
from tests.sources.torch_save.test_legacy import legacy
from tests.support.memory import anonymous_nbytes
from tests.support.taking import taken
from tests.support.torch_zips import as_torch_has_it, saved

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage")


class Obj:
    """An object with a tensor in its state, as checkpoints of whole trainers hold them."""

    def __init__(self, value: object = None) -> None:
        self.value = value


class Dicts(dict):  # type: ignore[type-arg]
    """A dict of somebody's own."""


Open = Callable[..., Source]


@pytest.fixture(params=["zip file", "zip pipe", "legacy file", "legacy pipe"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    def open_it(value: object, key: Key = None, *, ignore_unknown: bool = False) -> Source:
        data = saved(value) if "zip" in request.param else legacy(value)
        if "pipe" in request.param:
            return taken(open_source(io.BytesIO(data), key=key, ignore_unknown=ignore_unknown))
        (tmp_path / "source").write_bytes(data)
        return taken(open_source(tmp_path / "source", key=key, ignore_unknown=ignore_unknown))

    return open_it


def values(source: Source) -> dict[str, float]:
    """Tensors of one float each, by name in the order of the catalog."""
    with source:
        _, requests = requests_for(source.catalog)
        data = collect(source, requests, options())
        return {name: float(np.frombuffer(d, "<f4")[0]) for name, d in zip(source.catalog.names, data)}


def one(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


def training() -> dict[str, object]:
    """What a training loop saves."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {
        "epoch": 3,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "ema": {"weight": one(7), "bias": one(8)},
    }


# -- the rule


@pytest.mark.parametrize("name", ["state_dict", "model", "model_state_dict"])
def test_the_one_model_is_taken_and_the_report_says_so(opened: Open, name: str) -> None:
    """ST#146: weights under "state_dict", "model", nested twice, or absent."""
    checkpoint = training()
    checkpoint[name] = checkpoint.pop("model")
    source = opened(checkpoint)
    assert source.catalog.names == ("weight", "bias")
    (remark,) = source.traits.remarks
    assert f"using the tensors under '{name}'; skipped those under " in remark
    assert all(f"'{other}'" in remark for other in ("optimizer", "rng", "ema"))
    assert "'scheduler'" not in remark


def test_two_models_are_refused_and_named(opened: Open) -> None:
    checkpoint = {"model": {"a": one(1)}, "state_dict": {"a": one(2)}, "epoch": 1}
    with pytest.raises(
        UnsupportedCheckpointError,
        match=r"below 'model', 'state_dict' \(its keys: 'model', 'state_dict', 'epoch'\); choose with --key",
    ):
        opened(checkpoint)
    assert values(opened(checkpoint, "state_dict")) == {"a": 2}


def test_a_model_without_tensors_does_not_count(opened: Open) -> None:
    assert values(opened({"model": {"name": "x"}, "state_dict": {"a": one(2)}})) == {"a": 2}
    with pytest.raises(UnsupportedCheckpointError, match="nested below 'net'"):
        opened({"model": "resnet18", "net": {"a": one(2)}})


def test_an_optimizer_is_never_taken_by_the_rule(opened: Open) -> None:
    optimizer = training()["optimizer"]
    for checkpoint in (
        optimizer,
        {"optimizer": optimizer},
        {"model": {"optimizer": optimizer, "net": {"a": one(1)}}},
        {"model": {"Optim": {"a": one(1)}, "w": one(2)}},
    ):
        with pytest.raises(UnsupportedCheckpointError, match=r"nested below '(state|[oO]ptim)"):
            opened(checkpoint)


def test_models_nested_twice_are_found(opened: Open) -> None:
    source = opened({"model": {"state_dict": {"a": one(1)}, "optimizer": {"b": one(2)}}})
    assert values(source) == {"a": 1}
    assert "under 'model.state_dict'; skipped those under 'optimizer'" in source.traits.remarks[0]


def test_a_flat_dict_is_taken_whole_whatever_its_keys_are(opened: Open) -> None:
    source = opened({"model": one(1), "optimizer": one(2), "epoch": 4})
    assert values(source) == {"model": 1, "optimizer": 2}
    assert source.traits.remarks == ("skipped values that are not tensors: 1",)


def test_below_the_model_nested_dicts_become_dotted_names(opened: Open) -> None:
    model = OrderedDict(encoder=OrderedDict(w=one(1), layers=[{"b": one(2)}, (one(3), None)]), head=one(4), n=5)
    source = opened({"state_dict": model})
    assert values(source) == {
        "encoder.w": 1, "encoder.layers.0.b": 2, "encoder.layers.1.0": 3, "head": 4,
    }  # fmt: skip
    assert source.traits.remarks[1] == "skipped values that are not tensors: 2"


# -- a key


KEYS: list[tuple[Key, dict[str, float]]] = [
    ("a", {"b": 1, "c.d": 2, "c.e.0": 3, "c.e.1": 4}),
    ("a.c", {"d": 2, "e.0": 3, "e.1": 4}),
    (["a", "c"], {"d": 2, "e.0": 3, "e.1": 4}),
    ("a.c.e", {"0": 3, "1": 4}),
    ("x.y", {"w": 5}),
    (["x.y"], {"w": 5}),
    (["x", "y"], {"w": 6}),
    ("x.y.z", {"w": 7}),
    ("list.1", {"w": 9}),
    ("p.q.r", {"w": 12}),
    (["p", "q", "r"], {"w": 13}),
    ("", {"w": 10}),
]


@pytest.mark.parametrize(("key", "expected"), KEYS, ids=[str(key) for key, _ in KEYS])
def test_a_key_reaches_what_stands_under_it(opened: Open, key: Key, expected: dict[str, float]) -> None:
    checkpoint = {
        "a": {"b": one(1), "c": {"d": one(2), "e": [one(3), one(4)]}},
        "x.y": {"w": one(5)},
        "x": {"y": {"w": one(6)}, "y.z": {"w": one(7)}},
        "list": [{"w": one(8)}, {"w": one(9)}],
        "": {"w": one(10)},
        0: {"w": one(11)},
        "p": {"q": {"r": {"w": one(13)}}},
        "p.q": {"r": {"w": one(12)}},
    }
    source = opened(checkpoint, key)
    assert values(source) == expected
    assert source.traits.remarks == ()


def test_a_whole_checkpoint_can_be_taken(opened: Open) -> None:
    checkpoint = {"model": {"a": one(1)}, "optimizer": {"b": [one(2)]}, "c": one(3)}
    expected = {"model.a": 1, "optimizer.b.0": 2, "c": 3}
    assert values(opened(checkpoint, ".")) == expected
    assert values(opened(checkpoint, ())) == expected
    assert values(opened([{"w": one(1)}, one(2)], ".")) == {"0.w": 1, "1": 2}
    assert values(opened(({"w": one(1)}, 7), "0")) == {"w": 1}


@pytest.mark.parametrize("key", ["c", "a.c", "a.b.c", "a.1", ["a.b", "w"], "1", "a.", "list.01", "list.2"])
def test_a_key_that_is_not_there_is_refused_with_those_that_are(opened: Open, key: Key) -> None:
    checkpoint = {"a": {"b": {"w": one(1)}}, "list": [one(1), one(2)]}
    with pytest.raises(UnsupportedCheckpointError, match=r"nothing under the key .*its keys: 'a', 'list'"):
        opened(checkpoint, key)


def test_a_key_of_what_holds_no_names_is_refused(opened: Open) -> None:
    for key, message in (("w", "single tensor"), ("n", "3, not a dict"), ("d", "no tensors below 'd'")):
        with pytest.raises(UnsupportedCheckpointError, match=message):
            opened({"w": one(1), "n": 3, "d": {"x": 1}}, key)


def test_a_key_for_a_source_that_nests_nothing_is_refused(tmp_path: Path) -> None:
    stream_pack.save_file({"a": one(1)}, tmp_path / "pack")
    for source in (tmp_path / "pack", {"a": one(1)}, open_source(tmp_path / "pack")):
        with pytest.raises(OptionError, match="has none"):
            open_source(source, key="model")
        open_source(source, key=".").close()


@pytest.mark.parametrize("key", [5, ["a", 5], b"a"])
def test_a_key_that_is_no_text_at_all_is_wrong_usage(key: object) -> None:
    with pytest.raises(OptionError, match="expected a string"):
        open_source(io.BytesIO(saved({"a": one(1)})), key=key)  # type: ignore[arg-type]


# -- names


def test_names_that_collide_are_refused(opened: Open) -> None:
    for checkpoint in ({"a.b": one(1), "a": {"b": one(2)}}, {"a": {"0": one(1)}, "a.0": one(2)}):
        with pytest.raises(UnsupportedCheckpointError, match="two tensors are named 'a"):
            opened(checkpoint, ".")
        with pytest.raises(UnsupportedCheckpointError, match="below 'a'"):
            opened(checkpoint)


@pytest.mark.parametrize("key", [("a", 1), None, 1.5, True])
def test_a_key_that_is_neither_text_nor_a_number_is_refused_by_name(opened: Open, key: object) -> None:
    shown = repr(key).replace("(", r"\(").replace(")", r"\)")
    for inner in ({key: one(1)}, {key: {"w": one(1)}}):
        with pytest.raises(UnsupportedCheckpointError, match=f"under the key {shown} below 'a'"):
            opened({"a": inner}, ".")
    assert values(opened({key: 1, "w": one(2)})) == {"w": 2}


def test_tied_tensors_in_two_dicts_stay_tied(opened: Open, tmp_path: Path) -> None:
    shared = {"w": one(1)}
    report = stream_pack.convert(opened({"a": shared, "b": shared}, "."), tmp_path / "pack")
    assert (report.tensors, report.tied) == (2, 1)


# -- objects that only code could rebuild


def test_unknown_objects_are_listed_and_can_be_left_out(opened: Open) -> None:
    """PT#133163: a Namespace, NumPy scalars and classes of one's own stand beside the tensors."""
    checkpoint = {
        "model": {"w": one(1), "extra": np.float64(2), "obj": Obj(one(5))},
        "args": argparse.Namespace(lr=0.1, seen=one(6)),
        "function": json.dumps,
        "bytes": b"abc",
    }
    with pytest.raises(UnsupportedCheckpointError) as caught:
        opened(checkpoint)
    for name in ("numpy", "Obj", "--ignore-unknown"):
        assert name in str(caught.value)
    for name in ("argparse.Namespace", "json.dumps"):  # they are beside the model
        assert name not in str(caught.value)
    before = set(sys.modules)
    source = opened(checkpoint, ignore_unknown=True)
    assert set(sys.modules) == before
    assert values(source) == {"w": 1}
    assert source.traits.remarks[1] == "skipped values that are not tensors: 1"
    assert "the tensors inside them (1)" in source.traits.remarks[2]
    assert "argparse.Namespace" in source.traits.remarks[2]


@pytest.mark.parametrize("key", [None, "run.model"])
def test_an_object_in_place_of_a_dict_is_named_once_and_where_it_is(key: str | None) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    with pytest.raises(UnsupportedCheckpointError) as caught:
        open_source(io.BytesIO(saved(module if key is None else {"run": {"model": module}})), key=key)
    text = str(caught.value)
    assert text.startswith("the checkpoint is" if key is None else "what is under 'run.model' is")
    assert text.count("Sequential'") == 1
    assert "(the checkpoint also names 'torch.nn.modules.linear.Linear')" in text


def test_a_placeholder_is_never_a_tensor_nor_a_dict(opened: Open) -> None:
    for checkpoint in (Obj({"w": one(1)}), {"model": Dicts(w=one(1))}, Dicts(w=one(1))):
        with pytest.raises(UnsupportedCheckpointError):
            opened(checkpoint, ignore_unknown=True)


@pytest.mark.parametrize(
    "beside",
    [
        {"args": argparse.Namespace(x=one(2))},
        {"objects": [Obj(one(2))]},
        {"deeper": {"list": [Obj(one(2))]}},
        {"model": Obj(one(2))},
    ],
)
def test_what_stands_in_an_object_does_not_make_a_flat_dict_nested(opened: Open, beside: dict[str, object]) -> None:
    source = opened({"w": one(1), **beside}, ignore_unknown=True)
    assert values(source) == {"w": 1}
    assert "the tensors inside them (1)" in source.traits.remarks[-1]
    with pytest.raises(UnsupportedCheckpointError, match="--ignore-unknown"):
        opened({"w": one(1), **beside})


def test_a_number_is_a_key_of_a_dict_as_it_is_of_a_list(opened: Open) -> None:
    """The state of an optimizer is numbered."""
    checkpoint = {"optimizer": {"state": {0: {"avg": one(1)}, 7: {"avg": one(2)}, "7x": 3}}}
    assert values(opened(checkpoint, "optimizer.state.7")) == {"avg": 2}
    assert values(opened(checkpoint, ["optimizer", "state", "0"])) == {"avg": 1}
    for key in ("optimizer.state.1", "optimizer.state.07", "optimizer.state.-0"):
        with pytest.raises(UnsupportedCheckpointError, match="nothing under the key"):
            opened(checkpoint, key)


def test_a_known_object_that_holds_a_tensor_is_refused_or_left_out(opened: Open) -> None:
    checkpoint = {"a": {"c": Counter({"x": one(1)}), "d": deque([one(2)]), "w": one(3)}}
    with pytest.raises(UnsupportedCheckpointError, match=r"below 'a\.c' \(a 'collections\.Counter'\)"):
        opened(checkpoint, ".")
    source = opened(checkpoint, ".", ignore_unknown=True)
    assert values(source) == {"a.w": 3}
    assert "the tensors inside them (2)" in source.traits.remarks[0]


def test_a_tensor_that_cannot_be_packed_is_refused_though_unknown_objects_are_ignored(opened: Open) -> None:
    checkpoint = {"model": {"w": one(1), "q": torch.empty(2, device="meta")}}
    with pytest.raises(UnsupportedTensorError, match=r"tensor 'q' is on the meta device"):
        opened(checkpoint, ignore_unknown=True)
    # Beside the model it is in nobody's way.
    beside = {"model": {"w": one(1)}, "ema": {"q": torch.empty(2, device="meta")}}
    assert values(opened(beside)) == {"w": 1}


# -- hostile nesting


def pickled(value: bytes, key: Key = None) -> Source:
    return taken(open_source(io.BytesIO(with_pickle(b"\x80\x02" + value + b".")), key=key))


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def dicts(depth: int, inner: bytes) -> bytes:
    return (b"}" + text("k")) * depth + inner + b"s" * depth


def test_nesting_is_followed_a_hundred_levels_deep_and_no_further() -> None:
    assert pickled(dicts(100, tensor()), ".").catalog.names == (".".join("k" * 100),)
    with pytest.raises(UnsupportedCheckpointError, match="more than 100 levels deep"):
        pickled(dicts(101, tensor()), ".")
    deep = b"}" + text("deep") + dicts(5_000, b"N") + b"s" + text("w") + tensor() + b"s"
    assert pickled(deep, ".").catalog.names == ("w",)


def test_a_dict_that_holds_itself_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="holds itself"):
        pickled(b"}q\1" + text("w") + tensor() + b"s" + text("k") + b"h\1s", ".")
    with pytest.raises(UnsupportedCheckpointError):
        pickled(b"}q\1" + text("w") + tensor() + b"s" + text("model") + b"h\1s")
    empty = pickled(b"}q\1" + text("w") + tensor() + b"s" + text("k") + b"}q\2" + text("k") + b"h\2ss", ".")
    assert empty.catalog.names == ("w",)


def test_a_shared_dict_that_would_have_endless_names_is_refused() -> None:
    level = b"}" + text("w" * 1000) + tensor() + b"s"
    for _ in range(60):  # each dict stands twice in the next, which takes its place
        level += b"q\1" + b"0}" + text("a") + b"h\1s" + text("b") + b"h\1s"
    with pytest.raises(UnsupportedCheckpointError, match="names of the tensors take more than"):
        pickled(level, ".")


def laughs(levels: int, *, key: str = "l") -> bytes:
    """A list whose parts are the one below it, twice: 2 ** levels ways to one tensor."""
    return (
        b"}"
        + text("model")
        + b"}"
        + text("w")
        + tensor()
        + b"s"
        + text(key)
        + b"]"
        + tensor()
        + b"aq\1"
        + (b"0]h\1ah\1aq\1" * levels)
        + b"ss"
    )


@pytest.mark.parametrize(
    ("key", "selection"),
    [(None, {}), (".", {}), ("model", {}), ("model.l", {}), (".", {"include": "*.w"}), (None, {"exclude": "l.*"})],
)
def test_names_are_counted_before_one_is_made(
    monkeypatch: pytest.MonkeyPatch, key: Key, selection: dict[str, str]
) -> None:
    """40 levels: a billion names, of which torch.load knows nothing."""
    looked_at = 0

    def counted(key: object) -> str:
        nonlocal looked_at
        looked_at += 1
        return name_of(key)

    monkeypatch.setattr("stream_pack.pickles.contents.name_of", counted)
    monkeypatch.setattr("stream_pack.pickles.tensor_names.name_of", counted)
    data = with_pickle(b"\x80\x02" + laughs(40) + b".")
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedCheckpointError, match=r"take more than .*--key .* does not help"):
            stream_pack.forecast(io.BytesIO(data), key=key, **selection)  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert 0 < looked_at < 1000
    assert pickled(laughs(3), key).catalog.names[-1].endswith("1.1.1.0")


def test_names_that_memory_has_no_room_for_are_refused_before_one_is_made() -> None:
    data = with_pickle(b"\x80\x02" + laughs(18) + b".")
    assert anonymous_nbytes() < 3 << 30
    with pytest.raises(LimitError, match="max-memory"):
        stream_pack.forecast(io.BytesIO(data), key=".", max_memory=anonymous_nbytes() + (24 << 20))


def test_a_bomb_of_shared_tuples_around_no_tensor_is_looked_through_once() -> None:
    value = b"}" + text("bomb") + shared_twice(200) + b"s" + text("w") + tensor() + b"s"
    assert pickled(value, ".").catalog.names == ("w",)


def test_a_key_with_many_dots_is_looked_up_in_no_time() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="nothing under the key"):
        pickled(b"}" + text("a") + b"}q\1" + text("a") + b"h\1ss", ".".join("a" * 60) + ".b")


# -- looking at the keys


def test_the_keys_are_listed_with_what_they_hold() -> None:
    for data in (saved(training()), legacy(training())):
        rows = stream_pack.list_keys(io.BytesIO(data))
        found = {row.path: (row.kind, row.tensors, row.nbytes, row.chosen) for row in rows}
        rng = torch.get_rng_state().numel()
        # Adam's state of two parameters: step, exp_avg, exp_avg_sq.
        assert found == {
            (): ("dict", 11, 12 + 32 + rng + 8, False),
            ("model",): ("dict", 2, 12, True),
            ("optimizer",): ("dict", 6, 32, False),
            ("optimizer", "state"): ("dict", 6, 32, False),
            ("ema",): ("dict", 2, 8, False),
        }


def test_the_command_line_lists_keys_from_a_pipe_without_reading_tensors(tmp_path: Path) -> None:
    data = saved({"net": {"a": {"w": torch.ones(10)}, "b": [one(1), one(2)]}, "args": Obj(one(1))})
    head = data[: data.index(as_torch_has_it(torch.ones(10)))]
    command = [sys.executable, "-m", "stream_pack", "convert", "--list-keys", "-"]
    done = subprocess.run(command, input=head, capture_output=True, check=True)
    assert [line.split() for line in done.stdout.decode().splitlines()] == [
        ["key", "tensors", "storages", "kind"],
        [".", "4", "52", "B", "dict"],
        ["net", "3", "48", "B", "dict"],
        ["net.a", "1", "40", "B", "dict"],
        ["net.b", "2", "8", "B", "list"],
        ["args", "1", "4", "B", "tests.pickles.test_nesting.Obj"],
    ]
    as_json = subprocess.run([*command, "--json"], input=head, capture_output=True, check=True)
    assert json.loads(as_json.stdout)[2] == {
        "path": ["net", "a"], "kind": "dict", "tensors": 1, "nbytes": 40, "chosen": False,
    }  # fmt: skip


def test_a_source_that_nests_nothing_has_one_row(tmp_path: Path) -> None:
    stream_pack.save_file({"a": one(1), "b": one(2)}, tmp_path / "pack")
    (row,) = stream_pack.list_keys(tmp_path / "pack")
    assert (row.path, row.tensors, row.nbytes, row.chosen) == ((), 2, 8, True)
    (flat,) = stream_pack.list_keys(io.BytesIO(saved({"a": one(1)})))
    assert (flat.path, flat.kind, flat.tensors, flat.chosen) == ((), "dict", 1, True)


def test_sharing_without_end_does_not_keep_the_list_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_pack.pickles.outline.MAX_VISITED", 30_000)
    big = b"](" + tensor() + b"]" * 10_000 + b"eq\1"
    shared = b"".join(text(f"k{k}") + b"h\1s" for k in range(2000))
    value = b"}" + text("big") + big + b"s" + shared
    with pytest.raises(UnsupportedCheckpointError, match="too often"):
        stream_pack.list_keys(io.BytesIO(with_pickle(b"\x80\x02" + value + b".")))


def test_objects_that_share_what_they_hold_do_not_keep_the_search_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_pack.pickles.contents.MAX_LOOKED_AT", 30_000)
    big = b"](" + tensor() + b"]" * 10_000 + b"eq\1"
    shared = b"".join(text(f"k{k}") + b"ctorch\nSize\nh\1\x85\x81s" for k in range(2000))
    with pytest.raises(UnsupportedCheckpointError, match="nests more than"):
        pickled(b"}" + text("big") + big + b"s" + shared, ".")


# -- on the command line


def test_the_command_line_takes_keys(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "model.pt", tmp_path / "pack"
    source.write_bytes(saved({"net": {"a.b": {"w": one(1)}, "a": {"b": {"w": one(2)}}}, "args": Obj()}))

    def convert(*arguments: str) -> tuple[int, str, str]:
        return main(["convert", str(source), str(target), *arguments]), *capfd.readouterr()

    for arguments, expected in (
        (["--key", "net.a.b"], 1),
        (["--key", "net", "--key", "a.b"], 1),
        (["--key", "net", "--key", "a", "--key", "b"], 2),
    ):
        code, _, err = convert("--ignore-unknown", *arguments)
        assert code == 0, err
        assert "note: objects that need code to load were skipped" in err
        assert stream_pack.load_file(target)["w"].tolist() == [expected]
    code, _, err = convert("--key", ".", "--exclude", "net.*")
    assert code == 3
    assert "tests.pickles.test_nesting.Obj' (under 'args'); leave them out with --ignore-unknown" in err
    code, _, err = convert()
    assert code == 3
    assert "nested below 'net'" in err
    code, out, _ = convert("--dry-run", "--ignore-unknown", "--key", "net.a")
    assert code == 0
    assert "1 tensor (0 tied or views)" in out


def test_a_missing_target_is_wrong_usage_unless_keys_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "-"]) == 2
    assert "the following arguments are required: TARGET" in capfd.readouterr().err
