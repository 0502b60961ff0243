"""A file that is written to while it is read gives no pack: what was read may be a mixture of two states."""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import mmap_ninja
import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed_state

import stream_pack
from stream_pack.errors import SourceChangedError
from stream_pack.sources.open import Convertible, FileAt, open_source

VECTORS = Path(__file__).parent.parent / "vectors"
TENSORS = {"a": torch.arange(6000.0), "b": torch.arange(8000.0).reshape(80, 100)}


def safetensors_file(folder: Path) -> Path:
    safetensors.torch.save_file(TENSORS, folder / "m.safetensors")
    return folder / "m.safetensors"


def torch_zip(folder: Path) -> Path:
    torch.save(TENSORS | {"turned": TENSORS["b"].t()}, folder / "m.pt")
    return folder / "m.pt"


def torch_legacy(folder: Path) -> Path:
    torch.save(TENSORS, folder / "m.pt", _use_new_zipfile_serialization=False)
    return folder / "m.pt"


def gguf_file(folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    for name, tensor in TENSORS.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


def pack(folder: Path) -> Path:
    stream_pack.save_file(TENSORS, folder / "m.pack")
    return folder / "m.pack"


def program(folder: Path) -> Path:
    return Path(shutil.copy(VECTORS / "executorch" / "programs" / "packs.pte", folder))


def payload(folder: Path) -> Path:
    return Path(shutil.copy(VECTORS / "executorch" / "mps" / "conv_bn_fp32.mp00", folder))


def hugging_face(folder: Path) -> Path:
    weight_map = {}
    for name, tensor in TENSORS.items():
        safetensors.torch.save_file({name: tensor}, folder / f"{name}.safetensors")
        weight_map[name] = f"{name}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def llama(folder: Path) -> Path:
    for number in range(2):
        torch.save({"output.weight": TENSORS["b"].clone()}, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text(json.dumps({"dim": 100, "n_heads": 4, "vocab_size": 160}))
    return folder


def distributed(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves in a single process
        writer = FileSystemWriter(folder, single_file_per_rank=False)
        save_distributed_state(dict(TENSORS), storage_writer=writer, no_dist=True)
    return folder


def ninja(folder: Path) -> Path:
    mmap_ninja.np_from_ndarray(folder / "ninja", np.arange(6000, dtype=np.float32))
    return folder / "ninja"


MAKERS = (
    safetensors_file, torch_zip, torch_legacy, gguf_file, pack, program, payload,
    hugging_face, llama, distributed, ninja,
)  # fmt: skip


def files_of(source: Path) -> list[Path]:
    """Every file that the source consists of, all written to long ago."""
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    for path in files:
        os.utime(path, ns=(0, 0))
    return files


def rewrite(path: Path) -> None:
    """Write the first byte again: another state, though it has the same bytes."""
    with open(path, "r+b", buffering=0) as file:
        byte = file.read(1)
        file.seek(0)
        file.write(byte)


def convert_while(source: Convertible, target: Path, act: Callable[[], object], *, call: int = 0) -> int:
    """Convert, and ``act`` at one ``call`` of ``progress``, by its number; returns how many calls there were."""
    calls = 0

    def progress(_done: int, _total: int) -> None:
        nonlocal calls
        if calls == call:
            act()
        calls += 1

    stream_pack.convert(source, target, jobs=1, chunk_nbytes=4096, progress=progress)
    return calls


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("make", MAKERS)
def test_every_file_of_a_source_is_compared_with_what_it_was(
    make: Callable[[Path], Path], tmp_path: Path, at_the_end: bool
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    source, target = make(tmp_path / "source"), tmp_path / "target" / "out.pack"
    calls = convert_while(source, target, lambda: None)
    call = calls - 1 if at_the_end else 0
    target.write_bytes(b"as it was")
    for file in files_of(source):
        with pytest.raises(SourceChangedError, match=f"{file.name}' was changed while it was read: something has writ"):
            convert_while(source, target, partial(rewrite, file), call=call)
        assert target.read_bytes() == b"as it was"
        assert [path.name for path in target.parent.iterdir()] == ["out.pack"]
        os.utime(file, ns=(0, 0))


@pytest.mark.parametrize("make", MAKERS)
def test_a_source_that_is_read_or_renamed_or_given_another_mode_is_unchanged(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    source = make(tmp_path / "source")

    files = files_of(source)

    def touch_all_but_the_bytes() -> None:
        for file in files:
            file.read_bytes()
            os.link(file, f"{file}.link")
            os.chmod(file, 0o600)

    convert_while(source, tmp_path / "out.pack", touch_all_but_the_bytes)


@pytest.mark.parametrize("make", MAKERS)
def test_a_file_that_is_replaced_under_its_name_is_read_to_its_end(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    """As stream_pack replaces its own: what is open is still the old file, in one state."""
    (tmp_path / "source").mkdir()
    source = make(tmp_path / "source")

    files = files_of(source)

    def replace() -> None:
        for file in files:
            shutil.copy(file, tmp_path / "new")
            os.replace(tmp_path / "new", file)

    calls = convert_while(source, tmp_path / "undisturbed.pack", lambda: None)
    convert_while(source, tmp_path / "out.pack", replace, call=calls - 1)
    assert (tmp_path / "out.pack").read_bytes() == (tmp_path / "undisturbed.pack").read_bytes()


def test_a_shard_that_is_replaced_before_its_turn_is_no_part_of_the_set_any_more(tmp_path: Path) -> None:
    source = distributed(tmp_path / "source")
    last = max(source.glob("*.distcp"), key=lambda path: path.name)

    def replace() -> None:
        shutil.copy(last, tmp_path / "new")
        os.replace(tmp_path / "new", last)

    with pytest.raises(SourceChangedError, match=f"{last.name}' was changed .*: another file has taken its place"):
        convert_while(source, tmp_path / "out.pack", replace)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 20_000)


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(("change", "nbytes"), [(cut, -20_000), (grow, 4)])
def test_a_file_that_is_cut_or_grows_is_said_to_have_changed_not_to_be_too_short(
    tmp_path: Path, change: Callable[[Path], object], nbytes: int
) -> None:
    source = safetensors_file(tmp_path)
    before = source.stat().st_size
    with pytest.raises(SourceChangedError, match=f"it had {before} bytes, and now has {before + nbytes}"):
        convert_while(source, tmp_path / "out.pack", lambda: change(source))


@pytest.mark.parametrize("save", [torch.save, stream_pack.save_file])
def test_bytes_that_changed_meanwhile_are_not_called_damage(save: Callable[..., object], tmp_path: Path) -> None:
    source = tmp_path / "source"
    save({"a": torch.ones(100), "b": torch.arange(100_000.0)}, source)
    os.utime(source, ns=(0, 0))
    data = source.read_bytes()
    at = len(data) - 100_000  # beyond what is read ahead

    def overwrite() -> None:
        with open(source, "r+b") as file:
            file.seek(at)
            file.write(b"\xff" * 8)

    with pytest.raises(SourceChangedError, match="something has written to it") as caught:
        convert_while(source, tmp_path / "out.pack", overwrite)
    assert "is damaged" in str(caught.value.__context__)


def test_descriptors_and_file_objects_of_a_regular_file_are_compared_too(tmp_path: Path) -> None:
    path = safetensors_file(tmp_path)
    os.utime(path, ns=(0, 0))
    with open(path, "rb") as file:
        for source in (file, file.fileno()):
            os.utime(path, ns=(0, 0))
            with pytest.raises(SourceChangedError, match="^the source was changed while it was read"):
                convert_while(source, tmp_path / "out.pack", lambda: rewrite(path))
    os.utime(path, ns=(0, 0))
    convert_while(io.BytesIO(path.read_bytes()), tmp_path / "out.pack", lambda: rewrite(path))


def test_a_pack_inside_another_file_is_compared_with_the_file(tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.write_bytes(bytes(4096) + pack(tmp_path).read_bytes())
    os.utime(outer, ns=(0, 0))
    with pytest.raises(SourceChangedError, match="outer' was changed"):
        convert_while(open_source(FileAt(str(outer), 4096)), tmp_path / "out.pack", lambda: rewrite(outer))


def test_casts_and_selections_compare_the_source_below_them(tmp_path: Path) -> None:
    path = safetensors_file(tmp_path)
    os.utime(path, ns=(0, 0))
    with pytest.raises(SourceChangedError):
        stream_pack.convert(
            path, tmp_path / "out.pack", dtype="bf16", include="a", progress=lambda done, total: rewrite(path)
        )


def test_a_stream_gets_no_footer_of_a_source_that_has_changed(tmp_path: Path) -> None:
    path = safetensors_file(tmp_path)
    os.utime(path, ns=(0, 0))
    with open(tmp_path / "out.pack", "wb") as out, pytest.raises(SourceChangedError):
        stream_pack.convert(path, out, progress=lambda done, total: rewrite(path))
    with pytest.raises(stream_pack.FormatError):
        stream_pack.open(tmp_path / "out.pack")


def test_a_file_that_changes_after_its_head_was_read_is_noticed(tmp_path: Path) -> None:
    """Between opening and streaming as well: the head is part of what was read."""
    path = safetensors_file(tmp_path)
    os.utime(path, ns=(0, 0))
    with open_source(path) as source:
        rewrite(path)
        with pytest.raises(SourceChangedError):
            stream_pack.convert(source, tmp_path / "out.pack")
