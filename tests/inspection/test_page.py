"""The page of ``inspect --html``: whole by itself, safe with any name, and right in a real browser, light and dark."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch

import stream_pack
from stream_pack.cli import main
from stream_pack.inspection.page import page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (Debian's package: chromium)")

HOSTILE = [
    '</script><script>document.title = "owned"</script>',
    '</script x="',
    "<!--<script ",
    "<img src=x onerror=\"document.title='owned'\">",
    "line\u2028separator\u2029and\nnewline\0",
    "{{facts}} {{data}}",
    "__proto__.constructor",
    "a\u202eb\x1b[31m",
    "\U0001f600." * 3,
    "'\"&amp;&lt;\\u003c",
]


class Reader(HTMLParser):
    """What a parser that is not a browser's finds: tags, the text outside scripts, the data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.data: dict[str, Any] = {}
        self._script: str | None = None
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._script = dict(attrs).get("id") or "" if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
        elif self._script == "data":
            self.data = json.loads(data)


def read(path: Path) -> Reader:
    return Reader(path.read_text())


def browsed(path: Path, fragment: str = "", *options: str) -> str:
    """What Chromium makes of a page once its script has run."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000",
        f"--user-data-dir={path.parent / 'profile'}", *(options or ["--dump-dom"]), f"file://{quote(str(path))}{fragment}",
    ]  # fmt: skip
    # Nothing of the user's own: neither a session bus nor a home.
    home = {**os.environ, "HOME": str(path.parent), "DBUS_SESSION_BUS_ADDRESS": "disabled:"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=home, timeout=120)
    return done.stdout


def listed(dom: str) -> list[str]:
    """The names in the list of tensors, as far as they are in the DOM."""
    body = re.search(r'<tbody id="body">(.*?)</tbody>', dom, re.DOTALL)
    assert body is not None
    return [Reader(cell).text for cell in re.findall(r'<td class="name"[^>]*>.*?</td>', body[1], re.DOTALL)]


def counted(dom: str) -> str:
    found = re.search(r'<p id="count"[^>]*>(.*?)</p>', dom)
    assert found is not None
    return found[1]


def colour_of_the_corner(picture: Path) -> str:
    """The first pixel of a PNG.  No filter changes it: it has neighbours neither to the left nor above."""
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed = 8, b""
    while at < len(data):
        (nbytes,) = struct.unpack_from(">I", data, at)
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + nbytes]
        at += 12 + nbytes
    return zlib.decompress(packed)[1:4].hex()


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    weight = torch.ones(64, 64)
    tensors = {f"layers.{n}.w{k}": torch.full((300,), float(n)) for n in range(8) for k in range(3)}
    stream_pack.save_file({"embed": weight, **tensors, "head": weight, "none": torch.empty(0)}, tmp_path / "model.pack")
    return tmp_path / "model.pack"


def made(source: Path, *options: str, code: int = 0) -> Path:
    target = source.with_suffix(".html")
    assert main(["inspect", str(source), "--html", str(target), *options]) == code
    return target


def test_the_page_holds_every_tensor(pack: Path) -> None:
    reader = read(made(pack))
    with stream_pack.open(pack) as opened:
        assert reader.data["names"] == list(opened)
        for row, (name, view) in enumerate(opened.items()):
            assert reader.data["nbytes"][row] == view.nbytes, name
            assert reader.data["offset"][row] == view.file_offset
            assert reader.data["dtypes"][reader.data["dtype"][row]] == view.dtype
            assert reader.data["shapes"][reader.data["shape"][row]] == str(list(view.shape))
        assert f"{opened.checksum:016x}" in reader.text
    assert reader.data["files"] == [["", pack.stat().st_size]]
    assert "head is embed" in reader.text
    # Head and tail where docs/FORMAT.md puts them: header, graph, index, padding, locator; checksums, footer.
    names, begins, ends = zip(*reader.data["parts"])
    assert names == ("header", "graph", "index", "head padding", "locator", "checksums", "footer")
    assert begins[:2] == (0, 24)
    assert begins[1:5] == ends[:4]
    assert ends[4] == min(reader.data["offset"])
    assert (begins[6], ends[6]) == (ends[5], pack.stat().st_size)


def test_the_page_needs_nothing_else(pack: Path) -> None:
    path = made(pack)
    text = path.read_text()
    assert "://" not in text
    assert "@import" not in text
    assert "url(" not in text
    reader = read(path)
    assert {name for name, _ in reader.attributes}.isdisjoint({"src", "href", "srcset", "action"})
    assert {"img", "link", "iframe", "object", "embed"}.isdisjoint(reader.tags)
    policy = next(value for name, value in reader.attributes if name == "content" and "default-src" in (value or ""))
    assert policy is not None
    assert policy.startswith("default-src 'none';")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    tensors = {name: np.full(4, row, np.int32) for row, name in enumerate(HOSTILE)}
    metadata = {name: name for name in HOSTILE}
    stream_pack.save_file(tensors, tmp_path / "evil <b>.pack", metadata=metadata)
    return tmp_path / "evil <b>.pack"


def test_no_name_breaks_out_of_the_page(hostile: Path, pack: Path) -> None:
    text = made(hostile).read_text()
    reader = Reader(text)
    assert reader.data["names"] == HOSTILE
    assert set(reader.tags) - set(read(made(pack)).tags) <= {"details", "summary"}
    assert reader.tags.count("script") == 2
    for forbidden in ("\u2028", "\u2029", "\x1b", "\0", "\u202e"):
        assert forbidden not in text


@needs_browser
def test_a_browser_shows_hostile_names_as_text(hostile: Path) -> None:
    dom = browsed(made(hostile))
    assert 'data-ready="yes"' in dom
    assert "<title>evil &lt;b&gt;.pack</title>" in dom
    # A DOM that is dumped has no NUL, as no HTML can.
    assert [name.replace("\ufffd", "\0") for name in listed(dom)] == HOSTILE
    dom = browsed(made(hostile), "#q=" + quote(HOSTILE[0]))
    assert listed(dom) == [HOSTILE[0]]


@needs_browser
def test_a_search_lists_what_matches(pack: Path) -> None:
    path = made(pack)
    dom = browsed(path)
    assert 'data-ready="yes"' in dom
    assert counted(dom) == f"27 of 27 tensors, {(2 * 16384 + 24 * 1200) / 1024:.1f} KiB"
    dom = browsed(path, "#q=LAYERS+w1")
    assert listed(dom) == [f"layers.{n}.w1" for n in range(8)]
    assert counted(dom).startswith("8 of 27 tensors")
    assert listed(browsed(path, "#q=layers.3.*")) == [f"layers.3.w{k}" for k in range(3)]
    assert listed(browsed(path, "#q=layers.?.w0&sort=-name")) == [f"layers.{n}.w0" for n in range(7, -1, -1)]
    dom = browsed(path, "#sort=bytes")
    assert listed(dom)[:2] == ["embed", "head"]
    assert dom.count("aria-sort=") == dom.count('aria-sort="descending"') == 1


@needs_browser
@pytest.mark.parametrize("layers", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_of_100_000_tensors_only_those_in_sight_are_rows(layers: int, tmp_path: Path) -> None:
    tensors = {f"h.{n}.experts.{m}.w": np.zeros(1, np.int8) for n in range(layers) for m in range(250)}
    stream_pack.save_file(tensors, tmp_path / "many.pack")
    path = made(tmp_path / "many.pack")
    dom = browsed(path, f"#q=h.{layers - 1}.*.w")
    assert counted(dom).startswith(f"250 of {len(tensors):,} tensors")
    assert listed(dom)[0] == f"h.{layers - 1}.experts.0.w"
    assert dom.count("<tr") < 200
    assert path.stat().st_size < 60 * len(tensors) + 50_000


@needs_browser
@pytest.mark.parametrize(
    ("fragment", "scheme", "expected"),
    [
        ("", 0, "14171c"),  # what the user's system prefers: 0 is dark, 1 light
        ("", 1, "ffffff"),
        pytest.param("#theme=light", 0, "ffffff", marks=pytest.mark.slow),
        pytest.param("#theme=dark", 1, "14171c", marks=pytest.mark.slow),
    ],
)
def test_pictures_are_drawn_light_and_dark(fragment: str, scheme: int, expected: str, pack: Path) -> None:
    picture = pack.with_suffix(".png")
    settings = f"--blink-settings=preferredColorScheme={scheme}"
    browsed(made(pack), fragment, "--window-size=1200,1600", f"--screenshot={picture}", settings)
    assert colour_of_the_corner(picture) == expected


def test_damage_is_marked_where_verify_finds_it(pack: Path) -> None:
    with stream_pack.open(pack) as opened:
        position = opened["layers.3.w1"].file_offset + 5
        row = list(opened).index("layers.3.w1")
    data = bytearray(pack.read_bytes())
    data[position] ^= 1
    pack.write_bytes(data)
    reader = read(made(pack, "--verify", code=1))
    assert reader.data["damaged"] == [row]
    ((begin, end),) = reader.data["damages"]
    assert begin <= position < end
    assert "tensor 'layers.3.w1': block 0" in reader.text
    assert read(made(pack)).data["damaged"] == []


@needs_browser
def test_a_browser_shows_what_is_damaged(pack: Path) -> None:
    with stream_pack.open(pack) as opened:
        position = opened["layers.3.w1"].file_offset
    data = bytearray(pack.read_bytes())
    data[position] ^= 1
    pack.write_bytes(data)
    dom = browsed(made(pack, "--verify", code=1), "#q=layers.3.w1")
    assert ">DAMAGED</td>" in dom


def test_a_checkpoint_and_a_set_have_a_page(tmp_path: Path) -> None:
    sparse = torch.eye(2).to_sparse()
    torch.save({"w": torch.ones(4), "<s>": sparse}, tmp_path / "model.pt")
    reader = read(made(tmp_path / "model.pt"))
    assert reader.data["names"] == ["w"]
    assert "<s>: tensor '<s>' is sparse" in reader.text
    folder = tmp_path / "set"
    folder.mkdir()
    for k in range(2):
        torch.save({f"w{k}": torch.ones(4)}, folder / f"{k}.bin")
    (folder / "m.index.json").write_text(json.dumps({"weight_map": {"w0": "0.bin", "w1": "1.bin"}}))
    reader = read(made(folder))
    assert [name for name, _ in reader.data["files"]] == ["0.bin", "1.bin"]
    assert reader.data["file"] == [0, 1]


def test_the_page_goes_to_stdout_or_replaces_its_target(
    pack: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    assert main(["inspect", str(pack), "--html", "-"]) == 0
    out = capfdbinary.readouterr().out
    assert out == page(stream_pack.inspect(pack))
    target = tmp_path / "page.html"
    target.write_text("old")
    target.chmod(0o640)
    assert main(["inspect", str(tmp_path / "missing"), "--html", str(target)]) == 3
    assert target.read_text() == "old"
    assert main(["inspect", str(pack), "--html", str(target)]) == 0
    assert target.read_bytes() == out
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pack", "page.html"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["model.pack", "--html", "model.pack"], "it would replace it"),
        (["model.pack", "--html", ""], "--html is empty"),
        (["model.pack", "--verify"], "--html"),
        (["model.pack", "--html", "out.html", "--json"], "--json would have no effect"),
        (["model.pt", "--html", "out.html", "--verify"], "torch zip"),
    ],
)
def test_what_makes_no_sense_is_refused(
    argv: list[str], words: str, pack: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(2)}, pack.with_suffix(".pt"))
    before = pack.read_bytes()
    monkeypatch.chdir(pack.parent)
    assert main(["inspect", *argv]) == 2
    assert words in capfd.readouterr().err
    assert pack.read_bytes() == before
    assert not Path("out.html").exists()
