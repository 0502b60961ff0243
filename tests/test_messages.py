"""No message shows text from a file as it is: each value in a message is a number, quoted, or reviewed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "stream_pack"
PACKAGES = ("sources", "pickles", "pipeline", "et_files", "reader", "writer", "extraction", "inspection")

SHOWN = {"quoted", "listed", "shown", "shown_pickled", "counted", "human_nbytes", "printable", "len", "hex", "prod"}
"""Functions whose result is short and printable whatever they are given."""

NUMBERS = {
    "actual", "available", "axis", "begin", "bits", "buffer", "checksums_file_offset", "claimed", "count",
    "covered", "dim", "dims", "end", "expected", "file_nbytes", "file_offset", "filled", "first", "free", "have",
    "header_nbytes", "heads", "index", "itemsize", "itemsizes", "least", "limit", "longest", "max_memory", "method",
    "missing", "nbytes", "ndim", "number", "numel", "offset", "offsets", "pack_nbytes", "packed", "packed_nbytes",
    "pairs", "passed", "position", "protocol", "rank", "region", "region_nbytes", "samples", "shape", "shapes",
    "size", "sizes", "start", "stated", "step", "storage_nbytes", "storages_nbytes", "strides", "swapped",
    "tail_nbytes", "tensors", "total", "unserved", "version",
}  # fmt: skip
"""What numbers, and tuples of at most 64 of them, are called."""

OWN_WORDS = {
    # Put together of quoted names and of our own words, in the same function or by one that is looked at too.
    "also", "below", "hint", "named_by", "reason", "subject", "users", "what", "where", "which", "why", "of", "more",
    "chosen.where", "_keys()", "_looks_like()", "what_it_is()", "self._users()", "self._what", "fault",
    "describe()", "describe_start()", "much", "text", "advice", "target", "self._name()",
    # Names from our own tables.
    "label", "kind", "kind.name", "traits.kind", "raw", "DTYPES.name", "IDENTIFIER.decode()",
    "header.kind.name",
    # Texts of the parsers for JSON, regular expressions and deflate, which show no more than a position.
    "error",
    # The caller's own values and classes, not a file's.
    "framework", "device", "order", "verify", "path", "torch.__version__", "__module__",
    "__qualname__", "__name__", "os.fspath()", "layout",
}  # fmt: skip

REVIEWED = {
    # Joined from quoted texts, or from our own.
    ("pipeline/adapt/cast_rules.py", "', '.join(_BY_ALIAS)"),
    ("pipeline/adapt/select.py", "', '.join(given)"),
    ("sources/sets/dcp_chunks.py", "names"),
    ("sources/sets/dcp_metadata.py", "found"),
    ("sources/sets/llama.py", "found"),
    ("sources/sets/llama_params.py", "key"),
    ("sources/sets/llama_params.py", "wanted"),
    ("sources/sets/ninja.py", "file"),
    ("writer/incremental.py", "', '.join(dtypes.BY_NAME)"),
    ("writer/options.py", "name"),
    ("writer/parallel.py", "names"),
    # Numbers under names that are also used for other things.
    ("pipeline/bytestream.py", "wanted"),
    ("sources/gguf/header.py", "value"),
    ("sources/memory/source.py", "storage"),
    ("sources/sets/ninja.py", "list(shape)[:MAX_RANK]"),
    ("sources/torch_save/archive.py", "seen"),
    ("sources/torch_save/archive.py", "told"),
    ("sources/torch_save/zip_records.py", "found[0]"),
    ("sources/torch_save/zip_records.py", "found[1]"),
    ("sources/torch_save/zip_records.py", "found[2]"),
    ("sources/torch_save/zip_records.py", "wide or stated"),
    ("writer/incremental.py", "min(given, expected)"),
    ("writer/parallel.py", "int(begins[k + 1])"),
    ("writer/parallel.py", "min(int(ends[k]), int(ends[k + 1]))"),
    # The system's words.
    ("reader/file_range.py", "error.strerror"),
    # The caller's own values, and dtypes as NumPy and torch print them.
    ("reader/safe_open.py", "backend"),
    ("reader/safe_open.py", "str(device)"),
    ("reader/views.py", "dtype"),
    ("sources/memory/torch_tensors.py", "tensor.dtype"),
    ("sources/sets/ninja.py", "array.dtype"),
    # From our own table of frameworks.
    ("reader/frameworks.py", "package"),
    # Matched by an expression that leaves no room: "consolidated.00.pth", and a name from our table of dtypes.
    ("sources/sets/llama.py", "name"),
    ("sources/sets/llama.py", "self._names[0]"),
    ("sources/sets/llama.py", "self._names[shard]"),
    ("sources/sets/llama.py", "shard"),
    ("sources/sets/ninja.py", "name"),
}
"""Single values, each in one module, that are short and printable for the reason given."""


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def _makes_an_error(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns).strip("'\"").endswith("Error")
    )


def _messages(tree: ast.Module, makers: set[str]) -> Iterator[ast.AST]:
    """What is raised, what makes an error, and what such a function is given."""
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "id", getattr(called, "attr", None))
        if isinstance(node, ast.Raise) or _makes_an_error(node) or name in makers:
            yield node


def _word(node: ast.expr) -> str:
    """What the value is called: the last word or two of an expression, without its indexes."""
    if isinstance(node, ast.Subscript):
        return _word(node.value)
    if isinstance(node, ast.Call):
        return f"{_word(node.func)}()"
    if isinstance(node, ast.Attribute):
        return f"{_word(node.value)}.{node.attr}"
    return ast.unparse(node)


def _is_shown(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.BinOp):
        return _is_shown(node.left) and _is_shown(node.right)
    if isinstance(node, ast.IfExp):
        return _is_shown(node.body) and _is_shown(node.orelse)
    if isinstance(node, ast.JoinedStr):
        return all(_is_shown(v.value) for v in node.values if isinstance(v, ast.FormattedValue))
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("list", "int", "tuple"):
        return all(map(_is_shown, node.args))
    word = _word(node)
    last = word.rpartition(".")[2]
    if last.removesuffix("()").lstrip("_") in SHOWN | NUMBERS:
        return True
    return last.isupper() or word in OWN_WORDS or last in OWN_WORDS or ".".join(word.split(".")[-2:]) in OWN_WORDS


def _unseen(tree: ast.Module, makers: set[str]) -> Iterator[str]:
    for message in _messages(tree, makers):
        for node in ast.walk(message):
            if not isinstance(node, ast.FormattedValue) or node.format_spec is not None:
                continue
            if not _is_shown(node.value):
                yield ast.unparse(node.value)


def test_every_value_in_a_message_is_a_number_or_quoted_or_looked_at() -> None:
    modules = dict(_modules())
    makers = {
        node.name
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and _makes_an_error(node)
    }
    assert {"malformed", "_damaged"} <= makers
    found = {(path, text) for path, tree in modules.items() for text in _unseen(tree, makers)}
    assert found == REVIEWED


def test_a_name_that_is_not_quoted_is_seen() -> None:
    for text in ("{name}", "{name!r}", "{tensor.name[:100]!r}", "{names[0]}", "{', '.join(names)}", "{storage.key}"):
        tree = ast.parse(f'raise SourceError(f"the tensor {text} is damaged")')
        assert list(_unseen(tree, set())), text
    for text in ("{quoted(name)}", "{nbytes}", "{end - self.begin}", "{crc:08x}", "{list(shape)}", "{MAX_RANK}"):
        tree = ast.parse(f'raise SourceError(f"the tensor {text} is damaged")')
        assert not list(_unseen(tree, set())), text
