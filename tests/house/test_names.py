"""Check that files, modules, functions and commands named in prose exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import typer
from tree import FOLDERS as PRODUCT
from tree import ROOT, modules, parsed

from fsbench.cli import app

FOLDERS = (*PRODUCT.values(), "tools", "examples", "tests")
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
"""CHANGELOG.md has old names, and results/ are records: neither is checked."""

WRITTEN_BY_USERS = {
    "inverse_cdf_fp64.py",
    "my_sampler.py",
    "FILE.py",
    "e2e.md",
    "tiles.toml",
}
"""Files that a reader creates or a command writes."""
FOREIGN = {
    "llama.cpp",
    "do_sample",  # of transformers' generate
    "gumbel_topk_f16",  # akunu's kernel
    "final_logit_softcapping",  # of a model's config.json
}
"""Names of other projects."""
TREES = "kernels|fsbench|baselines|docs|tests|tools|examples"
SOURCES = ("py", "md", "toml", "sh", "h", "cpp", "html")
RESULTS = ("csv", "jsonl", "json", "png")
GROUP = "fsbench.providers"
"""An entry point group, not a module."""


class Text(NamedTuple):
    """A page, comment or docstring, with its file and first line."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def comments(path: Path) -> Iterator[Text]:
    """Yield the comments of a file; a string with # counts as one, which does no harm."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if comment := re.search(r"(?:^|\s)#.*", line):
            yield Text(path, number, comment[0].lstrip())


def identifiers(node: ast.AST) -> Iterator[str]:
    """Yield the names in a node, and its string if that is a name (lazy imports)."""
    for field in ("name", "asname", "id", "attr", "arg"):
        if isinstance(name := getattr(node, field, None), str):
            yield name
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        yield node.value


class Source(NamedTuple):
    """The docstrings of a file, those of variables included, and its identifiers."""

    docstrings: list[Text]
    names: set[str]


@cache
def source(path: Path) -> Source:
    docstrings, names = [], set()
    for node in ast.walk(parsed(path)):
        names.update(identifiers(node))
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            docstrings.append(Text(path, node.lineno, value.value))
    return Source(docstrings, names)


@cache
def paths() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def texts() -> list[Text]:
    """Return all prose: pages, comments and docstrings."""
    collected = [Text(page, 1, page.read_text(encoding="utf-8")) for page in PAGES]
    for pattern in ("Makefile", ".ci/run", "tools/*.sh", "kernels/**/*.toml", "fsbench/**/*.toml"):
        collected += [text for path in ROOT.glob(pattern) for text in comments(path)]
    for path in paths():
        collected += [*comments(path), *source(path).docstrings]
    return collected


@cache
def rooms() -> dict[str, list[str]]:
    """Map the last part of a package's name to the modules with that last part."""
    by_last_part: dict[str, list[str]] = {}
    for name in modules():
        by_last_part.setdefault(name.rpartition(".")[2], []).append(name)
    packages = {name.rpartition(".")[0] for name in modules()}
    return {
        last: by_last_part[last] for last in (p.rpartition(".")[2] for p in packages if "." in p)
    }


@cache
def all_names() -> set[str]:
    return FOREIGN.union(*(source(path).names for path in paths()))


@cache
def names_of(module: str) -> set[str]:
    return {name for node in ast.walk(modules()[module]) for name in identifiers(node)}


@cache
def why_unknown(dotted: str) -> str | None:
    """Return why a dotted name that begins with fsbench does not exist, or None if it exists."""
    parts = dotted.split(".")
    length = next(k for k in range(len(parts), 0, -1) if ".".join(parts[:k]) in modules())
    module, attributes = ".".join(parts[:length]), parts[length:]
    return f"no {attributes[0]} in {module}" if set(attributes) - names_of(module) else None


def test_dotted_names_exist():
    wrong = []
    for text in texts():
        for dotted in re.findall(r"(?<![\w.])fsbench(?:\.[A-Za-z_]\w*)+", text.text):
            if not dotted.startswith(GROUP) and (why := why_unknown(dotted)):
                wrong.append(f"{text}: {dotted}: {why}")
    assert not wrong


def test_names_relative_to_a_room_exist():
    """noise.keys.ordered_key in a docstring is fsbench.kernels.noise.keys.ordered_key."""
    wrong = []
    for text in texts():
        for dotted in re.findall(r"(?<![\w./-])[a-z0-9_]+(?:\.[A-Za-z_]\w*)+", text.text):
            first, _, remainder = dotted.partition(".")
            if first not in rooms() or remainder in (*SOURCES, *RESULTS):
                continue
            if all(why_unknown(f"{package}.{remainder}") for package in rooms()[first]):
                wrong.append(f"{text}: {dotted}")
    assert not wrong


def test_files_exist():
    """Prose names a file by its path from the root or by its name alone."""
    files = [path for folder in (*FOLDERS, "docs") for path in (ROOT / folder).rglob("*.*")]
    file_names = {path.name for path in (*files, *ROOT.iterdir())}
    exists = cache(lambda path: any(ROOT.glob(path)))
    extensions = "|".join(SOURCES)
    wrong = []
    for text in texts():
        named = re.findall(rf"(?<![\w/.-])(?:{TREES})/[\w./*-]*[\w*/](?![\w<])", text.text)
        wrong += [f"{text}: {path}" for path in named if not exists(path.rstrip("/"))]
        for name in re.findall(rf"(?<![\w<>*/.-])[\w-]+\.(?:{extensions})\b(?!\.)", text.text):
            if name not in file_names and name not in WRITTEN_BY_USERS | FOREIGN:
                wrong.append(f"{text}: {name}")
    assert not wrong


def test_private_names_exist():
    """A `_name` in prose, or a name in backticks with a _, is an identifier of the code."""
    wrong = []
    for text in texts():
        mentioned = re.findall(r"(?<![\w.*])_[a-z]\w+", text.text)
        mentioned += re.findall(r"`([a-z]+_\w*)`", text.text)
        mentioned += re.findall(r"`([A-Za-z_]\w*)\(", text.text)
        wrong += [f"{text}: {name}" for name in mentioned if name not in all_names()]
    assert not wrong


@cache
def commands() -> set[str]:
    """Return the commands of `fsbench`, and those of its groups as "group command"."""
    full_names = set()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if not command.hidden:
            full_names |= {name, *(f"{name} {part}" for part in getattr(command, "commands", ()))}
    return full_names


def test_commands_exist():
    groups = {name.partition(" ")[0] for name in commands() if " " in name}
    wrong = []
    for text in texts():
        fenced = "\n".join(re.findall(r"^```sh\n(.*?)^```", text.text, re.MULTILINE | re.DOTALL))
        called = re.findall(r"^fsbench (\w+)(?: (\w+))?", fenced, re.MULTILINE)
        for name, part in [*called, *re.findall(r"`fsbench (\w+)(?: (\w+))?", text.text)]:
            full = f"{name} {part}" if name in groups and part else name
            wrong += [] if full in commands() else [f"{text}: fsbench {full}"]
    assert not wrong


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    wrong = []
    for text in texts():
        mentioned = re.findall(
            r"(?:[`(]|^)make ([a-z-]+)(?=[`),.:]|$| +#)", text.text, re.MULTILINE
        )
        wrong += [f"{text}: make {name}" for name in mentioned if name not in targets]
    assert not wrong
