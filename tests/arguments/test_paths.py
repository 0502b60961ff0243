"""What a caller passes as a path is one, wherever it is passed: not empty, not a URL, and of possible characters."""

from __future__ import annotations

import io
import os
import pathlib
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import stream_pack
from stream_pack.arguments.paths import require_path
from stream_pack.cli import main
from stream_pack.errors import OptionError
from stream_pack.executorch import streaming_constants
from stream_pack.executorch.export.program import write_program

TENSORS = {"w": np.ones(3, np.float32)}
SPECS = {"w": ("float32", (3,))}


class Manager:
    """What write_program asks of ExecuTorch's program manager."""

    _pte_data = b"program"


def with_spool(path: str) -> object:
    return stream_pack.convert(TENSORS, io.BytesIO(), spool_dir=path)


def stream_in(path: str) -> None:
    with streaming_constants(path):
        pass


DOORS: dict[str, Callable[[str], object]] = {
    "source": lambda path: stream_pack.convert(path, io.BytesIO()),
    "forecast": stream_pack.forecast,
    "list_keys": stream_pack.list_keys,
    "target": lambda path: stream_pack.convert(TENSORS, path),
    "save_file": lambda path: stream_pack.save_file(TENSORS, path),
    "Writer": lambda path: stream_pack.Writer(path, SPECS),
    "ParallelWriter": lambda path: stream_pack.ParallelWriter(path, SPECS),
    "PartWriter": stream_pack.PartWriter,
    "spool_dir": with_spool,
    "spool_dir of list_keys": lambda path: stream_pack.list_keys(TENSORS, spool_dir=path),
    "open": stream_pack.open,
    "load_file": stream_pack.load_file,
    "safe_open": stream_pack.safe_open,
    "verify": stream_pack.verify,
    "inspect": stream_pack.inspect,
    "streaming_constants": stream_in,
    "write_program": lambda path: write_program(Manager(), path),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "is empty: expected a path"),
        ("s3://bucket/key", "is a URL, not a path"),
        ("a\0b", "no path can hold"),
        ("a\ud800b", "no path can hold"),
    ],
)
def test_no_function_takes_for_a_path_what_is_none(door: str, path: str, words: str, here: Path) -> None:
    with pytest.raises(OptionError, match=words):
        DOORS[door](path)
    assert os.listdir(here) == []


@pytest.mark.parametrize(
    "door", [name for name in DOORS if name not in ("source", "forecast", "inspect", "list_keys", "target", "Writer")]
)
@pytest.mark.parametrize("path", [3, None, 1.5, b"bytes"])
def test_a_path_is_text_or_a_path_object(door: str, path: object, here: Path) -> None:
    if path is None and door.startswith("spool"):
        return
    with pytest.raises(OptionError, match="expected a path"):
        DOORS[door](path)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["", "https://example.org/a"])
@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["convert", "?", "o.pack"], "SOURCE"),
        (["convert", "?", "--list-keys"], "SOURCE"),
        (["convert", "?", "--dry-run"], "SOURCE"),
        (["convert", "?", "o.pack", "--offset", "4096"], "SOURCE"),
        (["convert", "w.pack", "?"], "TARGET"),
        (["convert", "w.pack", "?", "--dry-run"], "TARGET"),
        (["convert", "w.pack", "o.pack", "--spool-dir", "?"], "--spool-dir"),
        (["inspect", "?"], "SOURCE"),
        (["verify", "?"], "FILE"),
        (["metal-plan", "?"], "PACK"),
    ],
)
def test_the_command_names_the_argument(
    argv: list[str], name: str, path: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stream_pack.save_file(TENSORS, "w.pack")
    assert main([path if word == "?" else word for word in argv]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"stream-pack: error: {name} is {'a URL, not a path' if path else 'empty'}: ")
    assert os.listdir(here) == ["w.pack"]


HUB = "https://huggingface.co"


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("https://example.org/m.pt", "curl -fL https://example.org/m.pt"),
        ("HTTP://example.org/m.pt", "curl -fL http://example.org/m.pt"),
        ("https://example.org/m?a=1&b=2", "curl -fL 'https://example.org/m?a=1&b=2'"),
        ("s3://bucket/a key", "aws s3 cp 's3://bucket/a key' -"),
        ("gs://bucket/key", "gsutil cat gs://bucket/key"),
        ("hf://owner/name/m.safetensors", f"curl -fL {HUB}/owner/name/resolve/main/m.safetensors"),
        ("hf://owner/name@v1/sub/m.pt", f"curl -fL {HUB}/owner/name/resolve/v1/sub/m.pt"),
        ("hf://datasets/owner/name/m.pt", f"curl -fL {HUB}/datasets/owner/name/resolve/main/m.pt"),
        (f"{HUB}/owner/name/blob/main/m.pt", f"curl -fL {HUB}/owner/name/resolve/main/m.pt"),
        ("abfs://container/key", "PROGRAM-THAT-FETCHES abfs://container/key"),
        ("https://example.org/" + "k" * 300, "curl -fL URL"),
        ("https://example.org/\x1b[31m", "curl -fL URL"),
    ],
)
def test_the_message_for_a_url_has_the_pipe_to_type(url: str, command: str) -> None:
    for use in ("source", "file"):
        with pytest.raises(OptionError) as caught:
            require_path("x", url, use)
        assert f"`{command} | stream-pack convert - x.pack`" in str(caught.value)
        assert str(caught.value).isprintable()
    assert len(shlex.split(command)) >= 2


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://b/k", "`stream-pack convert SOURCE - | aws s3 cp - s3://b/k`"),
        ("gs://b/k", "`stream-pack convert SOURCE - | gsutil cp - gs://b/k`"),
        ("https://example.org/p", "`stream-pack convert SOURCE - | curl -fT - https://example.org/p`"),
        ("hf://owner/name/p", "`hf upload OWNER/NAME FILE`"),
        ("file:///tmp/a%20b.pack", "pass '/tmp/a b.pack'"),
        ("file://localhost/tmp/p", "pass '/tmp/p'"),
    ],
)
def test_a_target_that_is_a_url_has_its_own_advice(url: str, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        require_path("target", url, "target")
    assert words in str(caught.value)


def test_a_repository_of_the_hub_is_fetched_as_a_folder() -> None:
    with pytest.raises(OptionError, match="`hf download OWNER/NAME`"):
        require_path("source", "hf://owner/name", "source")


def test_a_url_is_known_again_after_pathlib_took_a_slash_away() -> None:
    mangled = pathlib.PurePosixPath("s3://bucket/key")
    assert str(mangled) == "s3:/bucket/key"
    with pytest.raises(OptionError, match="`aws s3 cp s3://bucket/key -"):
        stream_pack.open(mangled)


def test_a_folder_may_be_called_like_the_beginning_of_a_url(here: Path) -> None:
    (here / "s3:" / "bucket").mkdir(parents=True)
    stream_pack.save_file(TENSORS, "s3://bucket/w.pack")
    assert stream_pack.open("s3://bucket/w.pack")["w"].numpy().tolist() == [1, 1, 1]
    with pytest.raises(OptionError):
        stream_pack.open("s3://bucket/v.pack")


@pytest.mark.parametrize("name", ["a:b", "c:/x/y", "weird:name.pack", "1://x"])
def test_a_name_with_a_colon_is_no_url(name: str) -> None:
    require_path("path", name, "file")


@pytest.mark.parametrize("path", ["./no.pack", "no//no.pack", "../no.pack"])
@pytest.mark.parametrize("read", [stream_pack.open, stream_pack.list_keys, stream_pack.verify])
def test_a_file_that_does_not_exist_is_called_as_it_was_given(
    path: str, read: Callable[[str], object], here: Path
) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        read(path)
    assert caught.value.filename == path


@pytest.mark.parametrize(
    ("target", "named", "error"),
    [
        ("nodir/a.pack", "nodir", FileNotFoundError),
        ("a/b/c.pack", "a/b", FileNotFoundError),
        ("file/a.pack", "file", NotADirectoryError),
        ("link", "{here}/gone", FileNotFoundError),
        ("new/", "new/", IsADirectoryError),
        (".", ".", IsADirectoryError),
    ],
)
def test_a_target_without_a_folder_names_the_folder(
    target: str, named: str, error: type[OSError], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "file").touch()
    (here / "link").symlink_to("gone/a.pack")
    with pytest.raises(error) as caught:
        stream_pack.save_file(TENSORS, target)
    assert caught.value.filename == named.format(here=here)
    assert sorted(os.listdir(here)) == ["file", "link"]
    np.save(here / "file", np.ones(2))
    stream_pack.save_file(TENSORS, "w.pack")
    assert main(["convert", "w.pack", target]) == 3
    assert f": {named.format(here=here)}\n" in capfd.readouterr().err
