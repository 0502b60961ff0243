"""Llama checkpoints in shards: every tensor equals the whole model's, in both layouts."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch

import stream_pack
from stream_pack.errors import LimitError, SourceChecksumError, TruncatedSourceError, UnsupportedCheckpointError
from stream_pack.sources.open import open_source
from tests.sources.sets.expectations import expected_of, read_path
from tests.sources.source_suite import Expected, MakeSource, SourceSuite, collect, options, requests_for
from tests.support.taking import taken

PARAMS = {"dim": 16, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "vocab_size": 24, "norm_eps": 1e-5}
HIDDEN = 40

# The rule, as Meta's own models have it: which dim each kind of weight is cut along; None: every shard has it.
LLAMA_2 = {
    "tok_embeddings": 1, "output": 0, "wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0,
    "attention_norm": None, "ffn_norm": None, "norm": None, "rope": None,
}  # fmt: skip
LLAMA_3 = LLAMA_2 | {"tok_embeddings": 0}


def whole_model(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (24, 16), "norm.weight": (16,)}
    for n in range(2):
        shapes |= {
            f"layers.{n}.attention.wq.weight": (16, 16),
            f"layers.{n}.attention.wk.weight": (8, 16),
            f"layers.{n}.attention.wv.weight": (8, 16),
            f"layers.{n}.attention.wo.weight": (16, 16),
            f"layers.{n}.feed_forward.w1.weight": (HIDDEN, 16),
            f"layers.{n}.feed_forward.w2.weight": (16, HIDDEN),
            f"layers.{n}.feed_forward.w3.weight": (HIDDEN, 16),
            f"layers.{n}.attention_norm.weight": (16,),
            f"layers.{n}.ffn_norm.weight": (16,),
        }
    shapes["output.weight"] = (24, 16)
    model = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return model | {"rope.freqs": torch.randn(2, generator=generator)}


def cut(
    model: Mapping[str, torch.Tensor], shards: int, layout: Mapping[str, int | None]
) -> list[dict[str, torch.Tensor]]:
    """The shards, each tensor a view of the whole as ``chunk`` gives it: not contiguous along dim 1."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    for name, tensor in model.items():
        dim = layout[name.split(".")[-2]]
        pieces = [tensor] * shards if dim is None else tensor.chunk(shards, dim)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


def contiguous(parts: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in part.items()} for part in parts
    ]


def write(folder: Path, parts: list[dict[str, torch.Tensor]], params: Mapping[str, object] = PARAMS) -> Path:
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text(json.dumps(params))
    return folder


class TestTwoShardsOfLlama2(SourceSuite):
    layout = LLAMA_2
    shards = 2

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        write(tmp_path, contiguous(cut(whole_model(), self.shards, self.layout)))
        return lambda: open_source(tmp_path)

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        return expected_of(whole_model())


class TestFourShardsOfLlama3(TestTwoShardsOfLlama2):
    layout = LLAMA_3
    shards = 4

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeSource:
        write(tmp_path, cut(whole_model(), self.shards, self.layout))
        return lambda: open_source(tmp_path)


@pytest.mark.parametrize("layout", [LLAMA_2, LLAMA_3])
@pytest.mark.parametrize("views", [True, False])
def test_any_number_of_shards_gives_the_pack_of_the_whole_model(
    tmp_path: Path, layout: Mapping[str, int | None], views: bool
) -> None:
    model = whole_model(torch.float16)
    stream_pack.save_file(model, tmp_path / "whole.pack")
    for shards in (1, 2, 4, 8):
        parts = cut(model, shards, layout)
        folder = write(tmp_path / str(shards), parts if views else contiguous(parts))
        report = stream_pack.convert(folder, target := tmp_path / "out.pack")
        assert target.read_bytes() == (tmp_path / "whole.pack").read_bytes()
        assert report.source_kind == f"Llama set of {shards} shard{'s' * (shards > 1)}"
        assert report.verification == "CRC-32 of every record verified"
        with open(tmp_path / "stream.pack", "wb", buffering=0) as out:
            stream_pack.convert(folder, out, spool_dir=tmp_path, chunk_nbytes=100)
        assert (tmp_path / "stream.pack").read_bytes() == target.read_bytes()


def test_by_name_both_layouts_give_the_pack_of_the_whole_model(tmp_path: Path) -> None:
    model = whole_model()
    torch.save(model, tmp_path / "whole.pt")
    stream_pack.convert(tmp_path / "whole.pt", tmp_path / "whole.pack", order="name")
    for number, layout in enumerate((LLAMA_2, LLAMA_3)):
        folder = write(tmp_path / str(number), cut(model, 2, layout))
        stream_pack.convert(folder, target := tmp_path / "out.pack", order="name")
        assert target.read_bytes() == (tmp_path / "whole.pack").read_bytes()


def test_shards_of_uneven_length_are_put_together_too(tmp_path: Path) -> None:
    model = whole_model()
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, tensor in model.items():
        dim = LLAMA_2[name.split(".")[-2]]
        cuts = (tensor, tensor) if dim is None else torch.tensor_split(tensor, [2], dim)
        for part, piece in zip(parts, cuts):
            part[name] = piece.contiguous()
    assert read_path(write(tmp_path, parts)) == {n: e.data for n, e in expected_of(model).items()}


def test_names_in_another_order_in_the_second_shard_change_nothing(tmp_path: Path) -> None:
    first, second = contiguous(cut(whole_model(), 2, LLAMA_2))
    folder = write(tmp_path, [first, dict(reversed(second.items()))])
    expected = expected_of(whole_model())
    assert read_path(folder) == {name: tensor.data for name, tensor in expected.items()}
    with open_source(folder) as source:
        assert list(source.catalog.names) == list(expected)


def test_tensors_tied_in_every_shard_stay_tied(tmp_path: Path) -> None:
    model = whole_model()
    parts = contiguous(cut(model, 2, LLAMA_3))
    for part in parts:
        part["output.weight"] = part["tok_embeddings.weight"]
    report = stream_pack.convert(write(tmp_path, parts), tmp_path / "out.pack")
    assert report.tied == 1


def test_shards_that_are_safetensors_by_another_name_are_read_as_what_they_are(tmp_path: Path) -> None:
    parts = contiguous(cut(whole_model(), 2, LLAMA_2))
    write(tmp_path, parts)
    for number, part in enumerate(parts):
        safetensors.torch.save_file(part, tmp_path / f"consolidated.{number:02}.pth")
    assert read_path(tmp_path) == {n: e.data for n, e in expected_of(whole_model()).items()}


def test_a_vocabulary_that_params_does_not_know_is_taken_from_the_shards(tmp_path: Path) -> None:
    for params in (PARAMS | {"vocab_size": -1}, {"dim": 16}):
        write(tmp_path, contiguous(cut(whole_model(), 2, LLAMA_2)), params)
        assert len(read_path(tmp_path)["output.weight"]) == 24 * 16 * 2


Shards = list[dict[str, torch.Tensor]]


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def in_second(name: str, tensor: torch.Tensor) -> Callable[[Shards], object]:
    return lambda shards: shards[1].update({name: tensor})


def in_both(name: str, tensor: torch.Tensor) -> Callable[[Shards], object]:
    return lambda shards: [shard.update({name: tensor}) for shard in shards]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda p: p.pop(), r"'tok_embeddings.weight' make up the shape \[24, 8\], and params.json says \[24, 16\]"),
        (lambda p: p[1].pop("norm.weight"), "differ in the tensors 'norm.weight'"),
        (lambda p: p[0].pop("norm.weight"), "differ in the tensors 'norm.weight'"),
        (in_second("norm.weight", torch.ones(16)), "different dtypes in the shards: bfloat16, float32"),
        (in_second("norm.weight", bf16(8)), "incompatible shapes"),
        (in_second("output.weight", bf16(12, 8)), "incompatible shapes"),
        (in_second("output.weight", bf16(13, 16)), r"'output.weight' make up the shape \[25, 16\]"),
        (in_both("gate.weight", bf16(2, 2)), r"cannot tell how to join .* 'gate.weight' \(shape "),
        (in_both("layers.0.attention.wq.weight", bf16(8)), "cannot tell how to join"),
        (in_both("layers.0.attention.wk.weight", bf16(16, 16)), r"make up the shape \[32, 16\], .* says \[8, 16\]"),
    ],
)
def test_shards_that_do_not_go_together_are_refused_before_a_byte_is_written(
    tmp_path: Path, change: Callable[[Shards], object], why: str
) -> None:
    parts = contiguous(cut(whole_model(), 2, LLAMA_2))
    change(parts)
    folder = write(tmp_path / "ckpt", parts)
    with pytest.raises(UnsupportedCheckpointError, match=why):
        taken(open_source(folder))


def test_a_missing_shard_of_llama_3_is_seen_in_the_vocabulary(tmp_path: Path) -> None:
    parts = contiguous(cut(whole_model(), 4, LLAMA_3))[:3]
    with pytest.raises(UnsupportedCheckpointError, match=r"\[18, 16\], and params.json says \[24, 16\]"):
        taken(open_source(write(tmp_path, parts)))


def test_a_shard_of_one_number_does_not_become_a_large_tensor(tmp_path: Path) -> None:
    shape = (1 << 20, 16)
    part = {"output.weight": torch.ones(1).expand(shape)}
    folder = write(tmp_path, [part, part], {"dim": 16})
    with pytest.raises(LimitError, match="allow_blowup|allow-blowup|4 times"):
        stream_pack.convert(folder, tmp_path / "out.pack")
    assert not (tmp_path / "out.pack").exists()


def test_a_gap_among_the_shards_is_named(tmp_path: Path) -> None:
    write(tmp_path, contiguous(cut(whole_model(), 4, LLAMA_2)))
    (tmp_path / "consolidated.01.pth").unlink()
    with pytest.raises(UnsupportedCheckpointError, match=r"'consolidated\.01\.pth' is missing"):
        taken(open_source(tmp_path))


@pytest.mark.parametrize("name", ["norm.weight", "rope.freqs"])
def test_replicated_tensors_that_differ_are_refused_and_the_target_is_as_before(tmp_path: Path, name: str) -> None:
    parts = contiguous(cut(whole_model(), 2, LLAMA_2))
    parts[1][name][-1] += 1
    folder = write(tmp_path / "ckpt", parts)
    target = tmp_path / "out.pack"
    target.write_bytes(b"before")
    with pytest.raises(UnsupportedCheckpointError, match=f"{name}' should be the same in every shard"):
        stream_pack.convert(folder, target, chunk_nbytes=3)
    assert target.read_bytes() == b"before"


def test_damage_in_a_shard_is_found_wherever_it_is(tmp_path: Path) -> None:
    parts = contiguous(cut(whole_model(), 2, LLAMA_2))
    folder = write(tmp_path / "ckpt", parts)
    shard = folder / "consolidated.01.pth"
    whole = shard.read_bytes()
    for name in ("tok_embeddings.weight", "norm.weight", "output.weight"):
        data = bytearray(whole)
        data[data.index(bytes(parts[1][name].view(torch.uint8).numpy()))] ^= 1
        shard.write_bytes(data)
        with pytest.raises((SourceChecksumError, UnsupportedCheckpointError)) as caught:
            stream_pack.convert(folder, tmp_path / "out.pack")
        assert "consolidated.01.pth" in str(caught.value)
    shard.write_bytes(whole[:-200])
    with pytest.raises(TruncatedSourceError, match=r"^'consolidated\.01\.pth': "):
        stream_pack.convert(folder, tmp_path / "out.pack")
    assert not (tmp_path / "out.pack").exists()


def test_damage_in_a_tensor_that_nobody_wants_is_found_all_the_same(tmp_path: Path) -> None:
    parts = contiguous(cut(whole_model(), 2, LLAMA_2))
    write(tmp_path, parts)
    shard = tmp_path / "consolidated.01.pth"
    data = bytearray(shard.read_bytes())
    data[data.index(bytes(parts[1]["output.weight"].view(torch.uint8).numpy()))] ^= 1
    shard.write_bytes(data)
    with open_source(tmp_path) as source:
        _, requests = requests_for(source.catalog, [source.catalog.names.index("norm.weight")])
        with pytest.raises(SourceChecksumError, match=r"^'consolidated\.01\.pth': .*output\.weight"):
            collect(source, requests, options())


def test_a_compressed_shard_is_refused_because_it_cannot_wait_for_the_others(tmp_path: Path) -> None:
    write(tmp_path, contiguous(cut(whole_model(), 2, LLAMA_2)))
    shard = tmp_path / "consolidated.01.pth"
    with zipfile.ZipFile(shard) as plain:
        members = {info.filename: plain.read(info) for info in plain.infolist()}
    with zipfile.ZipFile(shard, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    with pytest.raises(UnsupportedCheckpointError, match=r"consolidated\.01\.pth"):
        taken(open_source(tmp_path))


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "the dim 0"),
        ('{"dim": true}', "the dim True"),
        ('{"dim": -16}', "the dim -16"),
        ('{"dim": 16.0}', "the dim 16.0"),
        ('{"dim": 16, "n_heads": 3}', "a multiple of its heads"),
        ('{"dim": 16, "n_heads": "4"}', "the n_heads '4'"),
        ('{"dim": 32}', r"make up the shape \[24, 16\], and params.json says \[any, 32\]"),
        ('{"dim": 16, "n_heads": 4, "n_kv_heads": 4}', r"says \[16, 16\]"),
        ('{"dim": 16, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 25}', r"says \[25, 16\]"),
    ],
)
def test_params_that_do_not_fit_are_refused(tmp_path: Path, params: str, why: str) -> None:
    write(tmp_path, contiguous(cut(whole_model(), 2, LLAMA_2)))
    (tmp_path / "params.json").write_text(params)
    with pytest.raises(UnsupportedCheckpointError, match=why):
        taken(open_source(tmp_path))


def test_without_params_nothing_is_guessed(tmp_path: Path) -> None:
    write(tmp_path, contiguous(cut(whole_model(), 2, LLAMA_2)))
    (tmp_path / "params.json").unlink()
    with pytest.raises(UnsupportedCheckpointError, match="'params.json', which does not exist"):
        taken(open_source(tmp_path))
