"""The state of torch's optimizers, alone and in what training loops save: named as its own loader has it nested."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed_state

import stream_pack
from stream_pack.errors import StreamPackError
from stream_pack.pickles.nesting import Key
from tests.sources.torch_save.test_legacy import legacy
from tests.support.torch_zips import saved

MAKERS: dict[str, Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AMSGrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
}


def trained(make: Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]) -> tuple[torch.nn.Module, object]:
    """A module, and the state of an optimizer that has made a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = make(iter(list(model.parameters())))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 3)).pow(2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return model, optimizer.state_dict()


def named(value: object, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors in nested dicts, lists and tuples, keys and numbers joined by dots."""
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    found: dict[str, torch.Tensor] = {}
    for key, item in pairs:
        found |= named(item, f"{prefix}.{key}" if prefix else str(key))
    return found


def converted(source: object, target: Path, **options: object) -> dict[str, torch.Tensor]:
    stream_pack.convert(source, target, **options)  # type: ignore[arg-type]
    return dict(stream_pack.load_file(target))


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    assert expected
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def checkpoints(model: torch.nn.Module, state: object) -> list[tuple[object, Key, object]]:
    """What is saved, the key that is given, and what is below it."""
    assert isinstance(state, dict)
    training = {"epoch": 3, "model": model.state_dict(), "optimizer": state, "lr": [0.1, 0.2]}
    lightning = {
        "pytorch-lightning_version": "2.0",
        "state_dict": model.state_dict(),
        "optimizer_states": [state, state],
        "lr_schedulers": [{"last_epoch": 1}],
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5)}},
    }
    return [
        (state, ".", state),
        (state, "state", state["state"]),
        (training, ".", training),
        (training, "optimizer", state),
        (training, "optimizer.state", state["state"]),
        (training, "optimizer.state.0", state["state"][0]),
        (lightning, ".", lightning),
        (lightning, "optimizer_states", lightning["optimizer_states"]),
        (lightning, "optimizer_states.1.state", state["state"]),
    ]


@pytest.mark.parametrize("write", [saved, legacy], ids=["zip", "legacy"])
@pytest.mark.parametrize("maker", MAKERS)
def test_the_state_of_every_optimizer_converts(tmp_path: Path, maker: str, write: Callable[[object], bytes]) -> None:
    for checkpoint, key, below in checkpoints(*trained(MAKERS[maker])):
        data = write(checkpoint)
        expected = named(below)
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert named(loaded).keys() == named(checkpoint).keys()
        (tmp_path / "file").write_bytes(data)
        check(converted(tmp_path / "file", tmp_path / "pack", key=key), expected)
        check(converted(io.BytesIO(data), tmp_path / "pack", key=key), expected)


def test_what_is_selected_of_a_training_checkpoint_is_named_as_in_the_whole(tmp_path: Path) -> None:
    model, state = trained(MAKERS["AdamW"])
    checkpoint = {"model": model.state_dict(), "optimizer": state}
    everything = named(checkpoint)
    data = saved(checkpoint)
    for options in ({"include": "optimizer.state.1.*"}, {"exclude": "*.exp_avg*"}, {"include": "model.*"}):
        found = converted(io.BytesIO(data), tmp_path / "pack", key=".", **options)
        assert 0 < len(found) < len(everything)
        check(found, {name: tensor for name, tensor in everything.items() if name in found})


def test_names_are_those_that_a_distributed_checkpoint_gives(tmp_path: Path) -> None:
    model, state = trained(MAKERS["AdamW"])
    checkpoint = {"model": model.state_dict(), "optimizer": state}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in a single process
        save_distributed_state(checkpoint, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = converted(tmp_path / "dcp", tmp_path / "pack", key=".")
    one_file = converted(io.BytesIO(saved(checkpoint)), tmp_path / "pack", key=".")
    assert found.keys() == one_file.keys() == named(checkpoint).keys()


NUMBERS = [0, 7, -1, 2**31, 2**61 - 1, 2**62, -(2**80)]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("write", [saved, legacy], ids=["zip", "legacy"])
def test_a_number_of_any_size_is_a_part_of_a_name(
    tmp_path: Path, number: int, write: Callable[[object], bytes]
) -> None:
    data = write({number: torch.ones(2), "d": {number: {"w": torch.zeros(1)}}})
    everything = {str(number): torch.ones(2), f"d.{number}.w": torch.zeros(1)}
    check(converted(io.BytesIO(data), tmp_path / "pack", key="."), everything)
    check(converted(io.BytesIO(data), tmp_path / "pack", key=f"d.{number}"), {"w": torch.zeros(1)})


def test_a_number_beside_its_text_is_refused_only_where_both_are_taken(tmp_path: Path) -> None:
    data = saved({"s": {0: {"a": torch.ones(1)}, "0": {"a": torch.zeros(1), "b": torch.ones(1)}}, "w": torch.ones(2)})
    for options in ({}, {"include": "s.*"}, {"exclude": "w"}):
        with pytest.raises(StreamPackError, match="two tensors are named 's.0.a'.*--exclude"):
            converted(io.BytesIO(data), tmp_path / "pack", key=".", **options)
    assert converted(io.BytesIO(data), tmp_path / "pack", key=".", exclude="s.0.a").keys() == {"s.0.b", "w"}
    assert converted(io.BytesIO(data), tmp_path / "pack", key=".", include="w").keys() == {"w"}


@pytest.mark.parametrize("key", [True, False, None, 1.5, ("a", 1), b"\xff"])
def test_what_is_neither_text_nor_a_number_names_nothing_but_can_be_left_out(tmp_path: Path, key: object) -> None:
    data = saved({"a": {key: {"w": torch.ones(1)}, "ok": torch.zeros(1)}, "b": torch.ones(2)})
    for options in ({}, {"include": "a.*"}, {"exclude": "b"}):
        with pytest.raises(StreamPackError, match="below 'a': only text or an integer can name a tensor"):
            converted(io.BytesIO(data), tmp_path / "pack", key=".", **options)
    assert converted(io.BytesIO(data), tmp_path / "pack", key=".", exclude="a.*").keys() == {"b"}
    assert converted(io.BytesIO(data), tmp_path / "pack", key=".", include="a.ok").keys() == {"a.ok"}
