"""Check that files, modules, functions and commands named in prose exist."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import typer
from tree import FOLDERS as PRODUCT
from tree import ROOT, modules

from fsbench.cli import app

FOLDERS = (*PRODUCT.values(), "tools", "examples", "tests")
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
"""CHANGELOG.md has old names, and results/ are records: neither is checked."""

WRITTEN_BY_USERS = {
    "audit.html",
    "inverse_cdf.py",
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


@cache
def sources() -> dict[Path, ast.Module]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in paths}


def prose_in_code(path: Path, tree: ast.Module) -> Iterator[Text]:
    """Yield the comments and docstrings of a file, docstrings of variables included."""
    lines = io.StringIO(path.read_text(encoding="utf-8"))
    for token in tokenize.generate_tokens(lines.readline):
        if token.type == tokenize.COMMENT:
            yield Text(path, token.start[0], token.string)
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield Text(path, node.lineno, value.value)


def comments(path: Path) -> str:
    """Return the lines of a file that begin with #, with all other lines empty."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line if line.startswith("#") else "" for line in lines)


@cache
def texts() -> list[Text]:
    collected = [Text(page, 1, page.read_text(encoding="utf-8")) for page in PAGES]
    for pattern in ("Makefile", ".ci/run", "tools/*.sh", "kernels/**/*.toml", "fsbench/**/*.toml"):
        collected += [Text(path, 1, comments(path)) for path in ROOT.glob(pattern)]
    return [
        *collected,
        *(text for path, tree in sources().items() for text in prose_in_code(path, tree)),
    ]


@cache
def rooms() -> dict[str, list[str]]:
    """Map the last part of a module's name to the modules with that last part."""
    by_last_part: dict[str, list[str]] = {}
    for name in modules():
        by_last_part.setdefault(name.rpartition(".")[2], []).append(name)
    packages = {name.rpartition(".")[0] for name in modules()}
    below = {name.rpartition(".")[2] for name in packages if name.count(".")}
    return {last: by_last_part[last] for last in below}


def names(tree: ast.AST) -> set[str]:
    """Return the identifiers of a module and its strings that are identifiers (lazy imports)."""
    identifiers = set()
    for node in ast.walk(tree):
        for field in ("name", "asname", "id", "attr", "arg"):
            identifiers.add(getattr(node, field, None))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            identifiers.add(node.value if node.value.isidentifier() else None)
    return {name for name in identifiers if isinstance(name, str)}


@cache
def all_names() -> set[str]:
    return FOREIGN.union(*map(names, sources().values()))


def why_unknown(dotted: str) -> str | None:
    """Return why a dotted name that begins with fsbench does not exist, or None if it exists."""
    parts = dotted.split(".")
    length = next(k for k in range(len(parts), 0, -1) if ".".join(parts[:k]) in modules())
    attributes, tree = parts[length:], modules()[".".join(parts[:length])]
    missing = set(attributes) - names(tree)
    return f"no {attributes[0]} in {'.'.join(parts[:length])}" if missing else None


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
    paths = [path for folder in (*FOLDERS, "docs") for path in (ROOT / folder).rglob("*.*")]
    file_names = {path.name for path in paths}
    file_names |= {path.name for path in ROOT.iterdir()}
    extensions = "|".join(SOURCES)
    wrong = []
    for text in texts():
        paths = re.findall(rf"(?<![\w/.-])(?:{TREES})/[\w./*-]*[\w*/](?![\w<])", text.text)
        wrong += [f"{text}: {path}" for path in paths if not any(ROOT.glob(path.rstrip("/")))]
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
