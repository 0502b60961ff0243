"""Models take a pack's tensors, by copy or in place, tied ones tied; bytes and Apple's GPU."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import stream_pack
import stream_pack.metal
import stream_pack.numpy
import stream_pack.torch
from stream_pack import MetalUnavailable, ModelMismatchError, NotAPackError, UnsupportedDtype
from stream_pack.metal import interop
from tests.support.packs import pack_bytes, tensors

TOKENS = torch.tensor([[1, 2, 3, 5, 8]])


def llama(**changes: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=True, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def on_meta() -> LlamaForCausalLM:
    with torch.device("meta"):
        return llama()


def in_place(model: torch.nn.Module, path: Path) -> bool:
    """Whether the parameters lie in one range of the length of the file, as a mapping does."""
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    return max(addresses) - min(addresses) < path.stat().st_size


def test_a_model_is_trained_saved_and_loaded_in_place_with_equal_logits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama().eval()
    stream_pack.torch.save_model(model, tmp_path / "pack")
    taken = on_meta()
    taken.model.rotary_emb = LlamaRotaryEmbedding(taken.config)
    assert stream_pack.torch.load_into(taken.eval(), tmp_path / "pack") == ([], [])
    assert taken.lm_head.weight is taken.model.embed_tokens.weight
    assert in_place(taken, tmp_path / "pack")
    assert torch.equal(taken(TOKENS).logits, model(TOKENS).logits)
    before = (tmp_path / "pack").read_bytes()
    taken(TOKENS, labels=TOKENS).loss.backward()
    torch.optim.SGD(taken.parameters(), lr=0.5).step()
    assert (tmp_path / "pack").read_bytes() == before
    trained = taken(TOKENS).logits
    assert not torch.equal(trained, model(TOKENS).logits)
    stream_pack.torch.save_model(taken, tmp_path / "pack")  # over the file that it has its tensors from
    again = LlamaForCausalLM.from_pretrained(
        None, config=model.config, state_dict=stream_pack.torch.load_file(tmp_path / "pack")
    )
    assert torch.equal(again.eval()(TOKENS).logits, trained)
    assert stream_pack.torch.load_model(model, tmp_path / "pack") == ([], [])
    assert torch.equal(model(TOKENS).logits, trained)


def test_the_folder_that_transformers_saves_fits_the_model_though_it_lacks_a_tied_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = llama().eval()
    model.save_pretrained(tmp_path / "saved")
    stream_pack.convert(tmp_path / "saved", tmp_path / "pack")
    assert "lm_head.weight" not in stream_pack.load_file(tmp_path / "pack")
    for load in (stream_pack.torch.load_into, stream_pack.torch.load_model):
        other = llama().eval()
        assert load(other, tmp_path / "pack") == ([], [])
        assert other.lm_head.weight is other.model.embed_tokens.weight
        assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)


def test_buffers_on_meta_that_no_state_dict_holds_are_refused_before_anything_changes(tmp_path: Path) -> None:
    stream_pack.torch.save_model(llama(), tmp_path / "pack")
    model = on_meta()
    with pytest.raises(ModelMismatchError, match=r"'model\.rotary_emb\.inv_freq'.*on the CPU first"):
        stream_pack.torch.load_into(model, tmp_path / "pack", strict=False)
    assert all(parameter.is_meta for parameter in model.parameters())


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(3, 3, bias=False)
        self.two = torch.nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("step", torch.tensor(0))


LOADS = [stream_pack.torch.load_into, stream_pack.torch.load_model]


@pytest.mark.parametrize("load", LOADS)
def test_names_that_differ_are_refused_or_returned(load: Any, tmp_path: Path) -> None:
    stream_pack.save_file({"one.weight": torch.eye(3), "more": torch.ones(1)}, tmp_path / "pack")
    assert load(Tied(), tmp_path / "pack", strict=False) == (["step"], ["more"])
    with pytest.raises(ModelMismatchError, match="the pack lacks 'step'; the model lacks 'more'") as caught:
        load(Tied(), tmp_path / "pack")
    assert (caught.value.missing, caught.value.unexpected) == (("step",), ("more",))
    # As torch's own load_state_dict.
    stream_pack.save_file({"one.weight": torch.eye(2)}, tmp_path / "pack")
    with pytest.raises(RuntimeError, match="size mismatch"):
        load(Tied(), tmp_path / "pack", strict=False)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", ["one", "two", "both"])
def test_a_tied_tensor_is_found_under_any_of_its_names(load: Any, name: str, tmp_path: Path) -> None:
    names = ["one", "two"] if name == "both" else [name]
    # Equal tensors, each with bytes of its own.
    state = {f"{name}.weight": torch.eye(3) for name in names}
    stream_pack.save_file({**state, "step": torch.tensor(3)}, tmp_path / "pack")
    model = Tied()
    assert load(model, tmp_path / "pack") == ([], [])
    assert model.one.weight is model.two.weight
    assert isinstance(model.one.weight, torch.nn.Parameter)
    assert model.one.weight.requires_grad
    assert torch.equal(model.one.weight, torch.eye(3))
    assert model.step == 3


@pytest.mark.parametrize("load", LOADS)
def test_tensors_that_differ_cannot_be_one_of_the_model(load: Any, tmp_path: Path) -> None:
    state = {"one.weight": torch.eye(3), "two.weight": torch.ones(3, 3), "step": torch.tensor(3)}
    stream_pack.save_file(state, tmp_path / "pack")
    model = Tied()
    before = model.one.weight.clone()
    with pytest.raises(ModelMismatchError, match=r"'one\.weight' and 'two\.weight' differ in the pack"):
        load(model, tmp_path / "pack")
    assert torch.equal(model.one.weight, before)


def test_a_view_inside_a_tensor_that_was_found_is_found_too(tmp_path: Path) -> None:
    model = torch.nn.Module()
    whole = torch.zeros(4, 2)
    model.register_buffer("whole", whole)
    model.register_buffer("rows", whole[1:3])
    safetensors.torch.save_model(model, str(tmp_path / "safetensors"))  # leaves the rows out
    stream_pack.convert(tmp_path / "safetensors", tmp_path / "pack")
    assert list(stream_pack.load_file(tmp_path / "pack")) == ["whole"]
    assert stream_pack.torch.load_model(model, tmp_path / "pack") == ([], [])


@pytest.mark.parametrize("in_memory", [True, False])
def test_tensors_of_bytes_are_writable_copies_that_outlive_the_bytes(
    in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_memory:  # as on macOS
        monkeypatch.delattr(os, "memfd_create", raising=False)
        (tmp_path / "temporary").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    data = pack_bytes(tmp_path / "pack")
    assert stream_pack.torch.save(tensors()) == stream_pack.torch.save(tensors())
    loaded = stream_pack.torch.load(data)
    assert loaded.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert torch.equal(loaded[name], tensor)
    loaded["embed"].fill_(1)
    assert torch.equal(stream_pack.torch.load(data)["embed"], tensors()["embed"])
    arrays = stream_pack.numpy.load(stream_pack.numpy.save({"a": np.arange(5)}))
    arrays["a"] += 1
    assert arrays["a"].tolist() == [1, 2, 3, 4, 5]
    assert in_memory or not list((tmp_path / "temporary").iterdir())


def test_bytes_that_are_no_pack_are_called_data_not_a_file_that_nobody_knows() -> None:
    with pytest.raises(NotAPackError) as caught:
        stream_pack.torch.load(b"x" * 100)
    assert str(caught.value).startswith("data: ")
    assert "/proc" not in str(caught.value)


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for a Mac: which tensors were asked of the buffer layer."""
    asked: list[str] = []

    class Weights(dict[str, str]):
        def __enter__(self) -> Weights:
            return self

        def __exit__(self, *exc: object) -> None: ...

    def to_torch(name: str) -> torch.Tensor:
        asked.append(name)
        if name == "norm":
            raise UnsupportedDtype("not this one", tensor=name, dtype="bfloat16")
        return torch.full((1,), 7.0)

    moved = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, to: moved(self, "meta" if to == "mps" else to))
    monkeypatch.setattr(stream_pack.metal, "open", lambda pack: Weights({name: name for name in pack}))
    monkeypatch.setattr(interop, "to_torch", to_torch)
    return asked


@pytest.mark.parametrize("device", ["mps", torch.device("mps")])
def test_on_mps_tensors_come_from_the_buffer_layer_and_the_others_are_copied(
    device: str | torch.device, mps: list[str], tmp_path: Path
) -> None:
    pack_bytes(tmp_path / "pack")
    steps: list[tuple[int, int]] = []
    loaded = stream_pack.torch.load_file(
        tmp_path / "pack", device, progress=lambda done, total: steps.append((done, total))
    )
    assert mps == list(loaded) == list(tensors())
    assert [name for name, tensor in loaded.items() if tensor.is_meta] == ["norm"]
    total = sum(tensor.nbytes for tensor in tensors().values())
    assert steps[-1] == (total, total)


def test_on_mps_tensors_to_be_written_to_are_copies(
    mps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_bytes(tmp_path / "pack")
    assert all(
        tensor.is_meta for tensor in stream_pack.torch.load_file(tmp_path / "pack", "mps", writable=True).values()
    )
    assert mps == []

    def refuse(pack: object) -> None:
        raise MetalUnavailable("a discrete GPU")

    monkeypatch.setattr(stream_pack.metal, "open", refuse)
    assert all(tensor.is_meta for tensor in stream_pack.torch.load_file(tmp_path / "pack", "mps").values())
