"""Write the reference in docs/python.md from the docstrings: ``make docs``.

The source is parsed, not imported, so that signatures read as they are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import black
import griffe
from griffe2md import render_object_docs

ROOT = Path(__file__).parent.parent
MODULES = [
    "stream_pack",
    "stream_pack.torch",
    "stream_pack.numpy",
    "stream_pack.metal",
    "stream_pack.metal.interop",
    "stream_pack.executorch",
]
OPTIONS = {
    "filters": ["!^_[^_]"],
    "heading_level": 3,
    "inherited_members": False,
    "line_length": 120,
    "members_order": "alphabetical",
    "show_bases": False,
    "show_if_no_docstring": False,
    "show_object_full_path": False,
    "show_root_full_path": True,
    "show_signature_annotations": True,
    "summary": False,
}
MARK = "<!-- The rest is made by"
INTRODUCTION = """\
## Reference

*Units*, *Copies*, *Lifetime* and *Raises* say what a caller must know;
[troubleshooting.md](troubleshooting.md) explains the errors.
"""


def main() -> None:
    """Write the part of docs/python.md below its mark."""
    path = ROOT / "docs" / "python.md"
    by_hand, mark, made = path.read_text().partition(MARK)
    path.write_text(by_hand + mark + made.splitlines()[0] + "\n\n" + reference())


def reference() -> str:
    """What is below the mark in docs/python.md, but for the rest of its line."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser=None, allow_inspection=False)
    loader.load("stream_pack")
    loader.resolve_aliases(external=False)
    index: list[str] = []
    texts: list[str] = []
    shorthand: dict[str, griffe.Object | griffe.Alias] = {}
    anchors = Anchors()
    for path in MODULES:
        module = loader.modules_collection[path]
        names = sorted(str(name) for name in module.exports or ())
        members = [module[name] for name in names if not module[name].is_module]
        groups = {
            "Functions": [member for member in members if member.is_function],
            "Classes": [m for m in members if m.is_class and not _is_error(m)],
            "Errors": [m for m in members if m.is_class and _is_error(m)],
        }
        index.append(f"**[{path}]({anchors.add(path)})**\n")
        texts.append(f"## `{path}`\n\n{_plain(module.docstring.value)}\n")
        for title, group in groups.items():
            if group:
                links = ", ".join(f"[{member.name}]({anchors.add(member.path)})" for member in group)
                index.append(f"- {title}: {links}")
            for member in group:
                texts.append(_plain(render_object_docs(member, OPTIONS)))
                shorthand.update(_shorthand(member, loader))
        index.append("")
    lines = [f"{name} = {_unquoted(found)}" for name, found in sorted(shorthand.items())]
    code = black.format_str("\n".join(lines), mode=black.Mode(line_length=OPTIONS["line_length"]))
    names = f"## Names in signatures\n\n```python\n{code}```\n"
    text = "\n".join([INTRODUCTION, *index, *texts, names])
    return re.sub(r"\n{3,}", "\n\n", text)


class Anchors:
    """Where GitHub puts headings: one that says the same as an earlier one, but for case, gets a number."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}

    def add(self, heading: str) -> str:
        """The link to the next heading."""
        anchor = "#" + heading.lower().replace(".", "")
        count = self._count[anchor] = self._count.get(anchor, 0) + 1
        return anchor if count == 1 else f"{anchor}-{count - 1}"


def _is_error(member: griffe.Object | griffe.Alias) -> bool:
    return member.canonical_path.startswith("stream_pack.errors.")


def _shorthand(
    member: griffe.Object | griffe.Alias, loader: griffe.GriffeLoader
) -> Iterator[tuple[str, griffe.Object | griffe.Alias]]:
    """The names for types and defaults, such as ``To``, in the signatures of a function or a class's methods."""
    functions = [member] if member.is_function else member.all_members.values()
    expressions = [
        expression
        for function in functions
        if function.is_function
        for parameter in function.parameters
        for expression in (parameter.annotation, parameter.default)
    ]
    for name in (name for expression in expressions for name in _names(expression)):
        # A name that a method hides, as ``View.torch`` hides the module, leads nowhere.
        with suppress(KeyError):
            found = loader.modules_collection[name.canonical_path]
            if found.is_attribute and found.value is not None:
                yield name.name, found


def _unquoted(found: griffe.Object | griffe.Alias) -> str:
    return str(found.value).strip("'\"")


def _names(expression: object) -> Iterator[griffe.ExprName]:
    if isinstance(expression, griffe.ExprName):
        yield expression
    elif isinstance(expression, griffe.Expr):
        for part in expression.iterate(flat=True):
            if isinstance(part, griffe.ExprName):
                yield part


def _plain(text: str) -> str:
    """Markdown that GitHub shows: no roles of Sphinx, no links to where there is nothing."""
    text = re.sub(r":(?:class|func|meth|mod|data|attr):`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"<code>(.*?)</code>", lambda code: "`" + _unlinked(code[1]) + "`", text)
    return text.strip() + "\n"


def _unlinked(text: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


if __name__ == "__main__":
    main()
