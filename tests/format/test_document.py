"""docs/FORMAT.md, the vectors and the code say the same."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import xxhash

from stream_pack.format import limits
from stream_pack.format.dtypes import DTYPES
from stream_pack.format.head import decode_head
from stream_pack.format.header_kinds import KINDS
from stream_pack.format.records import Footer, Locator
from tests.vectors.minimal_reader import Pack, read

FORMAT = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text()
FOLDER = Path(__file__).parent.parent / "vectors"
VECTORS = {
    "mps": (FOLDER / "v1-mp00.pack").read_bytes(),
    "xnnpack": (FOLDER / "v1-xh00.pack").read_bytes(),
    "ptd": (FOLDER / "v1-ft01.pack").read_bytes(),
}
VECTOR = VECTORS["mps"]


def section(number: int) -> str:
    match = re.search(rf"^## {number}\. .*?(?=^## |\Z)", FORMAT, re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[0]


def table(number: int) -> list[list[str]]:
    """The cells of the tables of a section, headings left out."""
    rows = [line for line in section(number).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    rules = [n for n, row in enumerate(cells) if set(row[0]) <= set("-")]
    headings = {n - 1 for n in rules} | set(rules)
    return [row for n, row in enumerate(cells) if n not in headings]


@pytest.fixture(scope="module")
def foreign() -> Pack:
    """The vector as a reader sees it that was written from the text alone."""
    return read(VECTOR)


def test_the_hex_in_the_text_is_the_vector() -> None:
    written = bytearray(len(VECTOR))
    for block in re.findall(r"```hex\n(.*?)```", FORMAT, re.DOTALL):
        for row in block.splitlines():
            begin, _, values = row.partition("  ")
            data = bytes.fromhex(values)
            written[int(begin, 16) : int(begin, 16) + len(data)] = data
    assert bytes(written) == VECTOR


def test_a_reader_written_from_the_text_alone_finds_the_tensors(foreign: Pack) -> None:
    described = {row[0].strip("`"): (row[1].strip("`"), row[2]) for row in table(15)}
    assert list(foreign.tensors) == list(described)
    for name, tensor in foreign.tensors.items():
        assert (tensor.dtype, str(list(tensor.shape))) == described[name]
    one_to_six = struct.pack("<6f", 1, 2, 3, 4, 5, 6)
    assert {name: tensor.data for name, tensor in foreign.tensors.items()} == {
        "embed.weight": one_to_six,
        "norm.bias": bytes.fromhex("803f 0040 4040"),
        "head.weight": one_to_six,
        "empty": b"",
        "step": struct.pack("<q", 7),
    }
    assert foreign.metadata == {"format": "pt"}
    assert foreign.nbytes == len(VECTOR)


def test_the_checksums_of_the_vector_cover_what_the_text_says(foreign: Pack) -> None:
    assert xxhash.xxh3_64_intdigest(foreign.covered_head) == foreign.head_checksum
    assert xxhash.xxh3_64_intdigest(foreign.covered_by_root) == foreign.root_checksum
    assert [xxhash.xxh3_64_intdigest(block) for block in foreign.blocks] == foreign.block_checksums
    assert [len(block) for block in foreign.blocks] == [24, 6, 8]


def test_the_head_of_the_vector_is_read_the_same_by_the_package(foreign: Pack) -> None:
    region = 16384
    head = decode_head(memoryview(VECTOR)[:region])
    assert (head.region_file_offset, head.pack_nbytes) == (region, len(VECTOR))
    assert head.checksum == foreign.head_checksum
    index = head.index
    assert {
        index.name(k): (index.dtype_name(k), index.shape(k), region + index.offset(k)) for k in range(len(index))
    } == {name: (tensor.dtype, tensor.shape, tensor.file_offset) for name, tensor in foreign.tensors.items()}
    assert index.notes() == foreign.metadata


def test_the_table_of_dtypes_is_that_of_the_code() -> None:
    assert [(row[0].strip("`"), int(row[1]), int(row[3]), row[4]) for row in table(8)] == [
        (dtype.name, dtype.bits, dtype.mps, str(dtype.executorch).lower()) for dtype in DTYPES
    ]


def test_the_headers_of_the_vectors_are_the_tables_of_the_text() -> None:
    headers = {name: len(rows) for name, rows in header_tables().items()}
    assert headers == {"mps": 4, "xnnpack": 8, "ptd": 9}
    codes = {"u16": "<H", "u32": "<I", "u64": "<Q"}
    for kind, rows in header_tables().items():
        vector = VECTORS[kind]
        end = 0
        for at, field_type, field in rows:
            assert int(at) == end, (kind, field)
            if field_type in codes:
                (number,) = struct.unpack_from(codes[field_type], vector, end)
                end += struct.calcsize(codes[field_type])
                if field[0] == "R" or field == "region nbytes":  # both are a page here
                    assert number == 16384
                elif field[0].isdigit():
                    assert number == int(field.partition(":")[0])
                continue
            nbytes = int(field_type.removesuffix(" bytes"))
            literal = re.match(r"`([0-9a-f ]+)`", field)
            wanted = bytes.fromhex(literal[1]) if literal else bytes(nbytes)
            assert vector[end : end + nbytes] == wanted, (kind, field)
            end += nbytes
        assert end == KINDS[kind].header_nbytes


def header_tables() -> dict[str, list[list[str]]]:
    """The rows of the table behind each "Header of kind"."""
    found = {}
    for part in section(2).split("Header of kind `")[1:]:
        rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
        found[part.partition("`")[0]] = [[cell.strip() for cell in row] for row in rows[2:]]
    return found


@pytest.mark.parametrize("kind", ["xnnpack", "ptd"])
def test_the_other_vectors_hold_the_same_and_differ_in_nothing_behind_the_head(kind: str, foreign: Pack) -> None:
    other = read(VECTORS[kind])
    assert (foreign.kind, other.kind) == ("mps", kind)
    assert other.tensors == foreign.tensors
    assert (other.metadata, other.nbytes) == (foreign.metadata, foreign.nbytes)
    assert other.block_checksums == foreign.block_checksums
    assert VECTORS[kind][16384:-24] == VECTOR[16384:-24]
    assert xxhash.xxh3_64_intdigest(other.covered_head) == other.head_checksum
    assert xxhash.xxh3_64_intdigest(other.covered_by_root) == other.root_checksum


def test_the_table_of_the_index_is_the_schema() -> None:
    schema = Path(limits.__file__).parent / "schema" / "index.fbs"
    fields = re.findall(r"^  (\w+):(\S+);", schema.read_text(), re.MULTILINE)
    types = {"ulong": "u64", "uint": "u32", "ushort": "u16", "ubyte": "u8", "string": "strings"}
    assert [(row[1].strip("`"), row[2]) for row in table(5)] == [
        (name, types[kind.strip("[]")]) for name, kind in fields
    ]
    assert [int(row[0]) for row in table(5)] == list(range(len(fields)))


def test_the_records_have_the_magic_and_the_length_of_the_text() -> None:
    magics = {row[0]: bytes.fromhex(row[1].split("`")[1]) for row in table(3) if "89" in row[1]}
    assert magics == {"locator": Locator.MAGIC, "footer": Footer.MAGIC}
    assert "the locator has 48 bytes" in section(3)
    assert "and the footer 24" in section(3)
    assert (Locator.nbytes(), Footer.nbytes()) == (48, 24)


def test_the_limits_are_those_of_the_code() -> None:
    by_what = {row[0]: row[1] for row in table(9)}
    assert by_what == {
        "nbytes of a pack, nbytes and elements of a tensor": "2⁶²",
        "tensors": "2³¹ − 1",
        "dims of a tensor": "64",
        "dtypes": "256",
        "graph, index": "below 2³¹ bytes each",
        "R of kind `xnnpack`": "2³² − 1",
        "R, bytes before the region": "2³³",
        "locator, footer": "4096 bytes each",
        "block": "2¹² to 2³⁰ bytes",
        "alignment": "16 to 2³⁰ bytes",
    }
    assert limits.MAX_NBYTES == 2**62
    assert limits.MAX_TENSORS == 2**31 - 1
    assert limits.MAX_RANK == 64
    assert limits.MAX_XNNPACK_REGION_FILE_OFFSET == 2**32 - 1
    assert limits.MAX_HEAD_NBYTES == 2**33
    assert limits.MAX_FLATBUFFER_NBYTES == 2**31 - 1
    assert limits.MAX_RECORD_NBYTES == 4096
    assert (limits.MIN_BLOCK_NBYTES, limits.MAX_BLOCK_NBYTES) == (2**12, 2**30)


def test_the_schemas_need_no_64_bit_flatbuffers() -> None:
    # FB#7935, FB#8097, FB#7537: only C++ knows those; other languages silently do not see such fields.
    schemas = sorted((Path(__file__).parents[2] / "stream_pack" / "format" / "schema").glob("*.fbs"))
    assert [path.name for path in schemas] == ["flat_tensor.fbs", "graph.fbs", "index.fbs", "xnn_graph.fbs"]
    for path in schemas:
        declared = re.sub(r"//.*", "", path.read_text())
        attributes = {
            name.split(":")[0].strip() for group in re.findall(r"\(([^)]*)\)", declared) for name in group.split(",")
        }
        assert attributes <= {"force_align"}
        assert "64" not in re.sub("(?i)float64|int64|complex64", "", declared)
