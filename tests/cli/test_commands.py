"""The command line: what goes where, exit codes, and how it ends when it cannot do what it was asked."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import io
import json
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import tarfile
import termios
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import stream_pack
from stream_pack import cli
from stream_pack.cli import main
from stream_pack.cli.progress import PlainBar, progress_bar
from tests.support.packs import reseal

COMMAND = [sys.executable, "-m", "stream_pack"]
WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
BIG = {"w": torch.arange(300_000.0)}  # more than a pipe or two hold
LONG = safetensors.torch.save({"w": torch.ones(1_000_000)})
HALF = 3_000_000


def torch_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    path.write_bytes(torch_bytes(WEIGHTS))
    return path


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / "model.pack"
    stream_pack.save_file(WEIGHTS, path)
    return path


def run(
    *argv: str | Path,
    stdin: bytes | int = b"",
    stdout: int = subprocess.PIPE,
    before: Callable[[], None] | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """The real command, in a process of its own."""
    feed: dict[str, Any] = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    return subprocess.run(
        [*COMMAND, *argv],
        stdout=stdout,
        stderr=subprocess.PIPE,
        preexec_fn=before,
        env={**os.environ, **(environment or {})},
        check=False,
        **feed,
    )


def without(descriptor: int, *argv: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run a program that starts without a standard descriptor."""
    return subprocess.run(["sh", "-c", f'exec "$@" {descriptor}>&-', "sh", *argv], capture_output=True, check=False)


def assert_holds(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with stream_pack.open(path) as opened:
        assert list(opened) == list(tensors)
        for name, tensor in tensors.items():
            assert opened[name].dtype == str(tensor.dtype).removeprefix("torch.")
            assert torch.equal(opened[name].torch(), tensor)


def assert_one_line(text: str, *words: str) -> None:
    assert text.startswith("stream-pack: error: ")
    assert text.count("\n") == 1
    assert [word for word in words if word not in text] == []


# What goes where


def test_a_checkpoint_becomes_a_pack_and_one_line_says_what_was_done(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    assert main(["convert", str(source), str(target)]) == 0
    assert_holds(target, WEIGHTS)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"stream-pack: {target}: 2 tensors, 30 B in, ")
    assert err.count("\n") == 1


def test_a_pipe_gives_the_same_bytes_as_a_file_and_stdout_carries_nothing_else(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert main(["convert", "--quiet", str(source), str(target)]) == 0
    piped = run("convert", "-", "-", stdin=source.read_bytes())
    assert piped.returncode == 0
    assert piped.stdout == target.read_bytes()
    assert piped.stderr.startswith(b"stream-pack: stdout: 2 tensors")


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_what_torch_saves_to_its_stdout_is_packed_from_the_pipe(unbuffered: str, tmp_path: Path) -> None:
    program = "import sys, torch; torch.save({'w': torch.arange(300_000.)}, sys.stdout.buffer)"
    target = tmp_path / "target"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ) as producer:
        assert producer.stdout is not None
        assert run("convert", "-", target, stdin=producer.stdout.fileno()).returncode == 0
    assert_holds(target, BIG)


def test_stdin_that_is_a_file_is_read_from_where_it_stands(tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_bytes(b"x" * 64 + torch_bytes(WEIGHTS))
    with offset.open("rb", buffering=0) as file:
        file.read(64)
        assert run("convert", "-", tmp_path / "target", stdin=file.fileno()).returncode == 0
    assert_holds(tmp_path / "target", WEIGHTS)


def test_a_dash_as_a_file_name_can_be_said_in_another_way(source: Path, tmp_path: Path) -> None:
    assert main(["convert", "--quiet", str(source), str(tmp_path / "-")]) == 0
    assert_holds(tmp_path / "-", WEIGHTS)


def test_quiet_says_nothing_when_all_is_well(
    source: Path, pack: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "--quiet", str(source), str(tmp_path / "target")]) == 0
    assert main(["verify", "--quiet", str(pack)]) == 0
    assert capfd.readouterr() == ("", "")


def test_the_report_is_json_on_stdout(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    assert main(["convert", "--json", str(source), str(target)]) == 0
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert err == ""
    assert (report["tensors"], report["source_nbytes"], report["target_nbytes"]) == (2, 30, target.stat().st_size)


def test_the_report_is_json_on_stderr_when_stdout_carries_the_pack(
    source: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["convert", "--json", str(source), "-"]) == 0
    out, err = capfdbinary.readouterr()
    assert json.loads(err)["target_nbytes"] == len(out)


def test_the_report_in_json_says_which_files(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    assert main(["convert", "--json", str(source), str(target)]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["source"], report["target"]) == (str(source), str(target))


@pytest.mark.parametrize(
    ("argv", "error", "code"),
    [
        (["convert", "gone.pt", "target"], "FileNotFoundError", 3),
        (["convert", "gone.pt", "--list-keys"], "FileNotFoundError", 3),
        (["convert", "web.pt", "target"], "UnsupportedCheckpointError", 3),
        (["convert", "web.pt", "target", "--dtype", "f17"], "OptionError", 2),
        (["inspect", "gone.pack"], "FileNotFoundError", 3),
        (["inspect", "web.pt"], "NotAPackError", 3),
        (["verify", "gone.pack"], "FileNotFoundError", 3),
        (["verify", "web.pt"], "NotAPackError", 3),
        (["metal-plan", "web.pt"], "NotAPackError", 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_is_json_too_where_json_is_wanted(
    argv: list[str],
    error: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("web.pt").write_bytes(b"<!DOCTYPE html><html>")
    assert main([*argv, "--json"]) == code
    out, err = capfd.readouterr()
    told = json.loads(out)
    assert_one_line(err, told["message"])
    assert {**told, "message": ""} == {"ok": False, "error": error, "message": "", "exit": code, "path": argv[1]}


def test_a_wrong_command_line_is_json_too_by_the_name_of_its_class(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--json", "--no-such-option", "p.pack"]) == 2
    told = json.loads(capfd.readouterr().out)
    assert (told["error"], told["exit"]) == ("UsageError", 2)


def test_an_error_is_json_on_stderr_when_stdout_is_for_the_pack(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "gone.pt", "-", "--json"]) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert json.loads(err.splitlines()[-1])["exit"] == 3


def test_wrong_usage_is_json_too_where_json_is_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "a", "--json", "--jobs", "none"]) == 2
    out, err = capfd.readouterr()
    told = json.loads(out)
    assert (told["ok"], told["exit"], told["path"]) == (False, 2, None)
    assert told["message"] in err.splitlines()[-1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_stdout_that_is_full_is_named_and_not_the_file_that_was_read(command: str, pack: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run(command, pack, stdout=full.fileno())
    assert done.returncode == 4
    assert done.stderr.decode() == "stream-pack: error: No space left on device: stdout\n"


def test_metadata_is_stored(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    arguments = ["--metadata", "licence=CC BY 4.0", "--metadata", "formula=a=b"]
    assert main(["convert", "--quiet", *arguments, str(source), str(target)]) == 0
    with stream_pack.open(target) as opened:
        assert opened.metadata == {"licence": "CC BY 4.0", "formula": "a=b"}


def test_alignments_are_obeyed(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert main(["convert", "--quiet", "--alignment", "32K", str(source), str(target)]) == 0
    with stream_pack.open(target) as opened:
        assert [opened[name].file_offset % 32768 for name in opened] == [0, 0]
        assert opened["b"].file_offset - opened["w"].file_offset == 32768


def test_an_empty_checkpoint_is_an_empty_pack(tmp_path: Path) -> None:
    (tmp_path / "empty.pt").write_bytes(torch_bytes({}))
    assert main(["convert", "--quiet", str(tmp_path / "empty.pt"), str(tmp_path / "target")]) == 0
    assert_holds(tmp_path / "target", {})


def test_help_needs_neither_numpy_nor_torch() -> None:
    program = (
        "import sys; from stream_pack.cli import main; assert main(['--help']) == 0; "
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert {b"numpy", b"torch", b"tqdm"}.isdisjoint(done.stderr.split())
    assert b"exit codes:" in done.stdout


# Exit code 2: usage error


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["pack", "a", "b"],
        ["convert", "a"],
        ["convert", "--jobs", "0", "a", "b"],
        ["convert", "--jobs", "many", "a", "b"],
        ["convert", "--block-nbytes", "4MB", "a", "b"],
        ["convert", "--block-nbytes", "5000", "a", "b"],
        ["convert", "--alignment", "100", "a", "b"],
        ["convert", "--alignment", "0", "a", "b"],
        ["convert", "--alignment", "32K", "--large-alignment", "16K", "a", "b"],
        ["convert", "--metadata", "key", "a", "b"],
        ["convert", "--metadata", "key=\udcff", "a", "b"],
        ["inspect", "-", "--offset", "16"],
        ["inspect", "a", "--sort", "shape"],
        ["inspect", "a", "--limit", "0"],
        ["inspect", "a", "--key", ""],
        ["verify", "-"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(argv: Sequence[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "error: " in err.splitlines()[-1]


def test_usage_shows_what_the_user_can_type(capfd: pytest.CaptureFixture[str]) -> None:
    # The script is called stream-pack (setup.cfg); there is no command stream_pack.
    assert main(["verify"]) == 2
    assert capfd.readouterr().err.startswith("usage: stream-pack verify ")
    assert run("verify").stderr.startswith(b"usage: python -m stream_pack verify ")


def test_the_usage_for_an_unknown_option_is_that_of_its_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "a", "--include", "w"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("usage: stream-pack verify ")
    assert err.endswith("error: unrecognized arguments: --include w\n")


@pytest.mark.parametrize("closed", [0, 1])
def test_a_closed_descriptor_is_no_file_to_read_from_or_write_to(closed: int, source: Path, tmp_path: Path) -> None:
    argv: list[str | Path] = ["-", tmp_path / "target"] if closed == 0 else [source, "-"]
    done = without(closed, *COMMAND, "convert", *argv)
    assert done.returncode == 2
    assert_one_line(done.stderr.decode(), ("stdin", "stdout")[closed], "is closed")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_descriptor_that_is_not_needed_does_no_harm(closed: int, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert without(closed, *COMMAND, "convert", source, target).returncode == 0
    assert_holds(target, WEIGHTS)


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_no_file_takes_the_number_of_a_closed_descriptor(closed: int) -> None:
    program = "import os; from stream_pack.cli.terminal import Standard; Standard.take(); os._exit(os.open('/', 0))"
    assert without(closed, sys.executable, "-c", program).returncode > 2


def test_a_report_that_cannot_be_printed_is_no_surprise_at_the_end(source: Path, tmp_path: Path) -> None:
    done = without(1, *COMMAND, "convert", "--json", source, tmp_path / "target")
    assert done.returncode == 2
    assert_one_line(done.stderr.decode(), "stdout is closed")
    assert not (tmp_path / "target").exists()


def test_a_terminal_is_no_place_for_binary_data(source: Path, tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    try:
        os.write(master, b"\x04")  # Ctrl-D: whoever reads all the same comes to an end
        reading = run("convert", "-", tmp_path / "target", stdin=terminal)
        writing = run("convert", source, "-", stdout=terminal)
    finally:
        os.close(master)
        os.close(terminal)
    assert (reading.returncode, writing.returncode) == (2, 2)
    assert_one_line(reading.stderr.decode(), "stdin is a terminal")
    assert_one_line(writing.stderr.decode(), "stdout is a terminal")


# Exit code 3: the input is not what it should be


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty"]),
        (b"loading...\n" + torch_bytes(WEIGHTS), ["b'loading...\\n'", "stdout"]),
        (b"<!DOCTYPE html><title>Sign in</title>", ["web page"]),
        (b"version https://git-lfs.github.com/spec/v1\n", ["git lfs pull"]),
        (b"GGUF\3\0\0\0", ["GGUF"]),
        (b"\x1f\x8b\x08\0", ["gzip -dc"]),
        (b"\1\2\3\4", ["01 02 03 04"]),
        (torch_bytes(WEIGHTS)[:-1], ["end"]),
        (torch_bytes(WEIGHTS) + b"\0", ["trailing", "end"]),
        (torch_bytes(WEIGHTS).replace(bytes.fromhex("0000803f"), bytes.fromhex("0000903f"), 1), ["'w'", "CRC"]),
        (torch_bytes({"m": torch.ones(2).to_sparse()}), ["'m'", "sparse"]),
    ],
    ids=lambda value: repr(value[-12:]) if isinstance(value, bytes) else "",
)
def test_what_cannot_be_packed_is_exit_code_3_and_one_line_and_the_target_stays(
    content: bytes, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").write_bytes(content)
    (tmp_path / "target").write_bytes(b"as it was")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "target")]) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"stream-pack: error: {tmp_path}/source: ")
    assert_one_line(err)
    assert any(word in err for word in words)
    assert (tmp_path / "target").read_bytes() == b"as it was"
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        member = tarfile.TarInfo("storages")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"bytes"))
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, w=np.ones(3))
    return file.getvalue()


@functools.cache
def torch_script() -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        module = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))  # type: ignore[no-untyped-call]
        torch.jit.save(module, file)
    return file.getvalue()


@pytest.mark.parametrize("piped", [False, True], ids=["file", "pipe"])
@pytest.mark.parametrize(
    ("make", "words"),
    [(tarred, ["tar"]), (npz, ["NumPy", "npz"]), (torch_script, ["TorchScript", "state_dict()"])],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_archives_of_other_kinds_are_exit_code_3_with_their_name_and_advice_in_one_line(
    make: Callable[[], bytes], words: list[str], piped: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    content = make()
    source.write_bytes(content)
    if piped:
        # Quiet: a pipe whose first record is not the pickle has to be spooled, which is announced.
        done = run("convert", "--quiet", "-", target, stdin=content)
        code, out, err = done.returncode, done.stdout.decode(), done.stderr.decode()
    else:
        code = main(["convert", "--quiet", str(source), str(target)])
        out, err = capfd.readouterr()
    assert (code, out) == (3, "")
    assert_one_line(err, "stdin: " if piped else f"{source}: ", *words)
    assert os.listdir(tmp_path) == ["source"]


def test_a_file_may_be_converted_onto_itself_through_stdin(source: Path) -> None:
    # convert - model.pt < model.pt
    with source.open("rb") as file:
        assert run("convert", "--quiet", "-", source, stdin=file.fileno()).returncode == 0
    assert_holds(source, WEIGHTS)
    assert os.listdir(source.parent) == [source.name]


@pytest.mark.parametrize("link", ["hard", "symbolic"])
def test_a_file_may_be_converted_onto_another_name_of_itself(source: Path, link: str) -> None:
    before = source.read_bytes()
    other = source.parent / "other"
    if link == "hard":
        os.link(source, other)
    else:
        other.symlink_to(source.name)
    assert main(["convert", "--quiet", str(source), str(other)]) == 0
    assert_holds(other, WEIGHTS)
    assert other.is_symlink() is (link == "symbolic")
    if link == "hard":
        assert source.read_bytes() == before
    else:
        assert_holds(source, WEIGHTS)


def test_empty_input_from_a_pipe_leaves_no_file(tmp_path: Path) -> None:
    done = run("convert", "-", tmp_path / "target")
    assert done.returncode == 3
    assert_one_line(done.stderr.decode(), "stdin", "empty")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["convert", "no\nsuch file", "target"], "No such file or directory: no\\nsuch file"),
        (["inspect", "no\nsuch file"], "No such file or directory: no\\nsuch file"),
        (["verify", "no\nsuch file"], "No such file or directory: no\\nsuch file"),
        (["convert", "folder", "target"], "folder: "),
        (["inspect", "folder"], "folder: no known kind of checkpoint"),
        (["verify", "folder"], "Is a directory: folder"),
        (["verify", "fifo"], "not a regular file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_path_that_cannot_be_read_is_shown_as_it_was_given(
    argv: list[str], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 3
    _, err = capfd.readouterr()
    assert_one_line(err, reason)
    assert str(tmp_path) not in err


def test_a_folder_that_does_not_exist_is_named_as_it_was_given(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", source.name, "missing/target"]) == 3
    _, err = capfd.readouterr()
    assert_one_line(err, "No such file or directory: missing\n")


# Exit code 4: system error


def limit_file_nbytes() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_full_disk_is_exit_code_4_and_leaves_the_old_target(tmp_path: Path) -> None:
    source = tmp_path / "source"
    target = tmp_path / "target"
    source.write_bytes(torch_bytes(BIG))
    target.write_bytes(b"as it was")
    done = run("convert", source, target, before=limit_file_nbytes)
    assert done.returncode == 4
    assert_one_line(done.stderr.decode(), "File too large", "target")
    assert target.read_bytes() == b"as it was"
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_a_stream_that_takes_no_more_is_exit_code_4(source: Path) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        done = run("convert", source, "-", stdout=full.fileno())
    assert done.returncode == 4
    assert_one_line(done.stderr.decode(), "No space left", "stdout")


# Interrupted


@contextmanager
def halfway(target: Path, *, ignoring: Sequence[signal.Signals] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A conversion of LONG from a pipe that has written some of its output, and now waits for more input."""

    def set_signals() -> None:
        # The tests themselves may run under nohup, or in the background of a script.
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN if signum in ignoring else signal.SIG_DFL)

    with subprocess.Popen(
        [*COMMAND, "convert", "--quiet", "-", target],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=set_signals,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(LONG[:HALF])
        process.stdin.flush()
        # PT#63720: the output grows before the source has ended.
        while not any(path.stat().st_blocks for path in target.parent.glob(".stream_pack-*")):
            assert process.poll() is None
            time.sleep(0.01)
        yield process


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_conversion_that_is_interrupted_leaves_the_old_target_and_nothing_else(
    signum: signal.Signals, code: int, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"as it was")
    with halfway(target) as process:
        process.send_signal(signum)
        assert process.wait() == code
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert target.read_bytes() == b"as it was"
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("module", ["stream_pack.cli", "argparse", "stream_pack.cli.verify", "numpy"])
@pytest.mark.parametrize("way", ["module", "script"])
def test_a_signal_while_modules_are_imported_ends_the_program_quietly(
    way: str, module: str, signum: signal.Signals
) -> None:
    code = f"""
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {int(signum)})

signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background of a script,
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # or under nohup
sys.meta_path.insert(0, Interrupting())
sys.argv = ["stream-pack", "inspect", "missing.pack"]
if {way!r} == "module":
    runpy.run_module("stream_pack", run_name="__main__", alter_sys=True)
from stream_pack.__main__ import script
sys.exit(script())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signum, b"", b"")


def test_signals_that_are_ignored_stay_ignored(tmp_path: Path) -> None:
    # As under nohup.
    with halfway(tmp_path / "target", ignoring=[signal.SIGHUP]) as process:
        process.send_signal(signal.SIGHUP)
        assert process.stdin is not None
        process.stdin.write(LONG[HALF:])
        process.stdin.close()
        assert process.wait() == 0
    with stream_pack.open(tmp_path / "target") as opened:
        assert opened["w"].nbytes == 4_000_000


def test_a_caller_gets_its_own_signal_handlers_back(source: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert main(["convert", "--quiet", str(source), str(tmp_path / "target")]) == 0
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_a_reader_that_has_enough_ends_the_command_without_a_word(
    command: str, unbuffered: str, tmp_path: Path
) -> None:
    # Both outputs are longer than a pipe is.
    source = tmp_path / "source.pack"
    stream_pack.save_file({f"{'layers.' * 16}{k}": torch.ones(256) for k in range(1000)}, source)
    argv: list[str | Path] = [*COMMAND, command, source, *(["-"] if command == "convert" else [])]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        assert process.wait() == 141
        assert process.stderr.read() == b""


def test_help_that_nobody_reads_ends_without_a_word() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run("--help", stdout=writing, environment={"PYTHONUNBUFFERED": ""})
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


# Progress


def test_progress_is_shown_on_a_terminal_only(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(torch_bytes(BIG))
    command: list[str | Path] = [*COMMAND, "convert", tmp_path / "source", tmp_path / "target"]
    master, terminal = pty.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        subprocess.run(command, stderr=terminal, check=True)
        shown = os.read(master, 65536).decode()
    finally:
        os.close(master)
        os.close(terminal)
    *bars, summary = shown.removesuffix("\r\n").split("\r")
    assert any(" %|" in bar for bar in bars)
    assert summary.startswith("stream-pack: ")
    piped = subprocess.run(command, stderr=subprocess.PIPE, check=True).stderr
    assert piped.startswith(b"stream-pack: ")
    assert piped.count(b"\r") == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_tqdm_a_plain_line_is_written_over_at_most_ten_times_a_second() -> None:
    terminal = Terminal()
    seconds = iter([0.0, 0.05, 0.5, 0.55, 2.0])
    bar = PlainBar(terminal, clock=lambda: next(seconds))
    bar.update(1 << 20, 1 << 30)  # at 0.05 s: too early
    bar.update(256 << 20, 1 << 30)
    bar.update(257 << 20, 1 << 30)  # at 0.55 s: too early
    bar.update(1 << 30, 1 << 30)
    bar.close()
    first, second, last = terminal.getvalue().split("\r")[1:4]
    assert first.split() == "25 % 256 MiB of 1.00 GiB 512 MiB/s 0:02 left".split()
    assert second.split() == "100 % 1.00 GiB of 1.00 GiB 512 MiB/s 0:00 left".split()
    assert last.strip() == ""
    assert len(last) >= len(second.rstrip())


def test_tqdm_draws_the_bar_and_the_units_are_those_of_all_other_output(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("stream_pack.cli.progress.UPDATE_SECONDS", 0)  # draw at once
    with progress_bar(wanted=True) as progress:
        assert progress is not None
        progress(256 << 20, 1 << 30)
        progress(512 << 20, 1 << 30)
    drawn = terminal.getvalue()
    assert " 50 %|" in drawn
    assert "  512 MiB of 1.00 GiB  " in drawn
    assert "iB/s" in drawn
    assert not re.search("[0-9][kMG]", drawn)


def test_progress_degrades_when_tqdm_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress_bar(wanted=True) as progress:
        assert progress is not None
        progress(1, 2)
    assert set(terminal.getvalue()) <= set("\r ")


@pytest.mark.parametrize(("wanted", "stream"), [(False, Terminal()), (True, io.StringIO()), (True, None)])
def test_nobody_looks_so_nothing_is_shown(
    wanted: bool, stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar(wanted=wanted) as progress:
        assert progress is None


# inspect and verify


def test_inspect_lists_every_tensor_and_every_byte_of_the_file(pack: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(pack)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "w" in out
    assert "float32" in out
    assert "bfloat16" in out
    assert main(["inspect", "--json", str(pack)]) == 0
    out, _ = capfd.readouterr()
    json.loads(out)


def test_the_json_of_inspect_accounts_for_every_byte(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # ET#7088: no tool says what fills the file.
    path = tmp_path / "model.pack"
    w = torch.arange(6.0).reshape(2, 3)
    tensors = {"w": w, "tied": w, "none": torch.empty(0, 2), "b": WEIGHTS["b"]}
    stream_pack.save_file(tensors, path, metadata={"licence": "MIT"})
    content = path.read_bytes()
    assert main(["inspect", "--json", str(path)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    described = json.loads(out)
    parts = {part["name"]: part["nbytes"] for part in described["parts"]}
    assert len(parts) == len(described["parts"])
    assert sum(parts.values()) == described["nbytes"] == len(content)
    begin, nbytes = region(content)
    before = ["header", "graph", "index", "head padding", "locator"]
    assert list(parts) == [*before, "tensors", "region padding", "checksums", "footer"]
    assert sum(parts[name] for name in before) == begin
    assert parts["header"] == 24
    assert parts["tensors"] == 24 + 6  # the tied one counts once
    assert parts["region padding"] == nbytes - 30
    assert parts["checksums"] == 2 * 8
    assert described["tensors"] == 4
    assert described["tensors_nbytes"] == 24 + 24 + 6
    assert described["metadata"] == {"licence": "MIT"}
    rows = {row["name"]: row for row in described["rows"]}
    assert list(rows) == list(tensors)
    for name, tensor in tensors.items():
        row = rows[name]
        assert row["shape"] == list(tensor.shape)
        assert f"torch.{row['dtype']}" == str(tensor.dtype)
        stored = content[row["file_offset"] :][: row["nbytes"]]
        assert stored == bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    numbers = {name: number for number, name in enumerate(rows)}
    assert rows["w"]["shared_with"] == numbers["tied"]
    assert rows["tied"]["shared_with"] == numbers["w"]
    assert rows["w"]["buffer"] == rows["tied"]["buffer"]


@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_a_text_waits_for_a_stdout_that_does_not_block(
    tmp_path: Path, json_: list[str], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "p"
    stream_pack.save_file({f"tensor{n}": np.ones(1) for n in range(4000)}, path)
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(sending, fcntl.F_SETPIPE_SZ, 4096)  # a small part of what is to come
    with subprocess.Popen([*COMMAND, "inspect", *json_, path], stdout=sending, stderr=subprocess.PIPE) as process:
        os.close(sending)
        with open(receiving, "rb") as file:
            text = file.read()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert main(["inspect", *json_, str(path)]) == 0
    assert text == capfdbinary.readouterr().out
    assert len(text) > 100_000


def test_verify_finds_a_good_pack_good(pack: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(pack)]) == 0
    out, err = capfd.readouterr()
    assert "no damage" in out
    assert err == ""


def damaged(pack: Path) -> int:
    """Flip a bit of tensor w; return its file offset."""
    with stream_pack.open(pack) as opened:
        file_offset = opened["w"].file_offset
    content = bytearray(pack.read_bytes())
    content[file_offset] ^= 1
    pack.write_bytes(content)
    return file_offset


def test_verify_names_the_tensor_and_the_bytes_that_are_damaged(pack: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file_offset = damaged(pack)
    assert main(["verify", "--quiet", str(pack)]) == 1
    out, err = capfd.readouterr()
    assert err == ""
    assert "'w'" in out
    assert str(file_offset) in out
    assert main(["verify", "--json", str(pack)]) == 1
    out, _ = capfd.readouterr()
    (damage,) = json.loads(out)["damages"]
    assert damage["tensors"] == ["w"]
    assert (damage["file_begin"], damage["file_end"]) == (file_offset, file_offset + 24)


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_pack_of_another_length_is_damaged(
    command: str, change: int, pack: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = pack.read_bytes()
    pack.write_bytes(content[:change] if change < 0 else content + b"x")
    assert main([command, str(pack)]) == 1
    out, err = capfd.readouterr()
    assert ("is truncated" if change < 0 else "1 byte follows the pack") in out + err


@pytest.mark.parametrize(
    ("command", "content"),
    [
        *((command, content) for command in ("inspect", "verify") for content in (b"", b"\x1f\x8b\x08\0")),
        ("verify", torch_bytes(WEIGHTS)),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_what_is_no_pack_is_exit_code_3(
    command: str, content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new\nline"
    path.write_bytes(content)
    assert main([command, str(path)]) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert_one_line(err, f"{tmp_path}/new\\nline: ")
    assert err.count("new\\nline") == 1


def region(content: bytes | bytearray) -> tuple[int, int]:
    """File offset and nbytes of the region, as the header's bytes 8 to 24 say."""
    file_offset, nbytes = struct.unpack_from("<QQ", content, 8)
    return file_offset, nbytes


def test_a_raw_payload_can_be_looked_at_and_has_nothing_to_verify_against(
    pack: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # What ExecuTorch writes: no locator before the region, nothing behind it.
    stream_pack.save_file({"w": WEIGHTS["w"]}, pack)
    content = pack.read_bytes()
    begin, nbytes = region(content)
    pack.write_bytes(content[: begin - 16] + bytes(16) + content[begin : begin + nbytes])
    assert main(["inspect", str(pack)]) == 0
    assert "float32  [2, 3]" in capfd.readouterr().out
    assert main(["verify", str(pack)]) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert_one_line(err, "raw MP00 payload", "no checksums")


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["convert"]], ids=" ".join)
def test_a_pack_of_a_later_version_is_not_called_damaged(
    command: list[str], pack: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(pack.read_bytes())
    begin, _ = region(content)
    content[begin - 12 : begin - 8] = (99).to_bytes(4, "little")  # the locator's version, then its magic of 8 bytes
    pack.write_bytes(reseal(content))
    target = [str(tmp_path / "target")] if command == ["convert"] else []
    assert main([*command, str(pack), *target]) == 3
    _, err = capfd.readouterr()
    assert_one_line(err, "newer stream_pack")


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("record", ["locator", "footer"])
def test_a_flipped_version_is_damage_and_not_a_later_version(
    record: str, command: str, pack: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(pack.read_bytes())
    end = region(content)[0] if record == "locator" else len(content)
    for bit in range(32):
        content[end - 12 + bit // 8] ^= 1 << bit % 8
        pack.write_bytes(content)
        assert main([command, str(pack)]) == 1
        out, err = capfd.readouterr()
        assert "damaged" in out + err
        assert "newer" not in out + err
        content[end - 12 + bit // 8] ^= 1 << bit % 8


def test_a_damaged_pack_is_not_what_a_conversion_wants(
    pack: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damaged(pack)
    assert main(["convert", str(pack), str(tmp_path / "target")]) == 3
    _, err = capfd.readouterr()
    assert_one_line(err, "'w'")
    assert os.listdir(tmp_path) == [pack.name]


def test_names_from_a_pack_cannot_drive_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pack = tmp_path / "model.pack"
    stream_pack.save_file({"evil\x1b[2J\n": torch.ones(1), "é": torch.ones(1)}, pack, metadata={"\x1b]0;": "\r"})
    assert main(["inspect", str(pack)]) == 0
    out, _ = capfd.readouterr()
    assert out.replace("\n", "").isprintable()
    assert "evil\\x1b[2J\\n" in out
    assert "é" in out


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    pack = tmp_path / "model.pack"
    stream_pack.save_file({"é": torch.ones(1)}, pack)
    done = subprocess.run(
        [*COMMAND, "inspect", pack], env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True
    )
    assert b"\\xe9" in done.stdout


def test_an_internal_error_is_neither_damage_nor_silence(
    pack: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise ZeroDivisionError("ours")

    monkeypatch.setitem(cli.COMMANDS, "verify", dataclasses.replace(cli.COMMANDS["verify"], run=fail))
    assert main(["verify", str(pack)]) == 4
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].endswith("internal error: ZeroDivisionError: ours; please report it")
