"""Every file, module, function and command that a comment, docstring or page names exists."""

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
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
"""Not CHANGELOG.md, which has old names, nor results/, which are records."""

MADE = {"audit.html", "inverse_cdf.py", "my_sampler.py", "FILE.py", "e2e.md", "tiles.toml"}
"""Files that a reader is to make, or that a command writes."""
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
    """What was written where: a page, or a comment or docstring, and the line where it begins."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


@cache
def sources() -> dict[Path, ast.Module]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in paths}


def said_in_code(path: Path, tree: ast.Module) -> Iterator[Text]:
    """Comments and docstrings, those of variables too."""
    lines = io.StringIO(path.read_text(encoding="utf-8"))
    for token in tokenize.generate_tokens(lines.readline):
        if token.type == tokenize.COMMENT:
            yield Text(path, token.start[0], token.string)
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield Text(path, node.lineno, value.value)


def comments(path: Path) -> str:
    """The lines of a file that begin with #, other lines empty."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line if line.startswith("#") else "" for line in lines)


@cache
def texts() -> list[Text]:
    found = [Text(page, 1, page.read_text(encoding="utf-8")) for page in PAGES]
    for pattern in ("Makefile", ".ci/run", "tools/*.sh", "kernels/**/*.toml", "fsbench/**/*.toml"):
        found += [Text(path, 1, comments(path)) for path in ROOT.glob(pattern)]
    return [
        *found,
        *(text for path, tree in sources().items() for text in said_in_code(path, tree)),
    ]


@cache
def rooms() -> dict[str, list[str]]:
    """Last part of the name of a package, or of a module in one -> those of that name."""
    found: dict[str, list[str]] = {}
    for name in modules():
        found.setdefault(name.rpartition(".")[2], []).append(name)
    packages = {name.rpartition(".")[0] for name in modules()}
    below = {name.rpartition(".")[2] for name in packages if name.count(".")}
    return {last: found[last] for last in below}


def names(tree: ast.AST) -> set[str]:
    """Every identifier in a module, and every string that is one (names that are imported late)."""
    found = set()
    for node in ast.walk(tree):
        for field in ("name", "asname", "id", "attr", "arg"):
            found.add(getattr(node, field, None))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value if node.value.isidentifier() else None)
    return {name for name in found if isinstance(name, str)}


@cache
def all_names() -> set[str]:
    return FOREIGN.union(*map(names, sources().values()))


def why_unknown(dotted: str) -> str | None:
    """None if a dotted name that begins with fsbench is a module, or something in one."""
    parts = dotted.split(".")
    known = next(k for k in range(len(parts), 0, -1) if ".".join(parts[:k]) in modules())
    rest, tree = parts[known:], modules()[".".join(parts[:known])]
    return f"no {rest[0]} in {'.'.join(parts[:known])}" if set(rest) - names(tree) else None


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
            first, _, rest = dotted.partition(".")
            if first not in rooms() or rest in (*SOURCES, *RESULTS):
                continue
            if all(why_unknown(f"{package}.{rest}") for package in rooms()[first]):
                wrong.append(f"{text}: {dotted}")
    assert not wrong


def test_files_exist():
    """By their path from the root, or by their name alone."""
    there = {path.name for folder in (*FOLDERS, "docs") for path in (ROOT / folder).rglob("*.*")}
    there |= {path.name for path in ROOT.iterdir()}
    kinds = "|".join(SOURCES)
    wrong = []
    for text in texts():
        paths = re.findall(rf"(?<![\w/.-])(?:{TREES})/[\w./*-]*[\w*/](?![\w<])", text.text)
        wrong += [f"{text}: {path}" for path in paths if not any(ROOT.glob(path.rstrip("/")))]
        for name in re.findall(rf"(?<![\w<>*/.-])[\w-]+\.(?:{kinds})\b(?!\.)", text.text):
            if name not in there and name not in MADE | FOREIGN:
                wrong.append(f"{text}: {name}")
    assert not wrong


def test_private_names_exist():
    """A `_name` in a comment is something in the code, as are names in backticks with a _."""
    wrong = []
    for text in texts():
        found = re.findall(r"(?<![\w.*])_[a-z]\w+", text.text)
        found += re.findall(r"`([a-z]+_\w*)`", text.text)
        found += re.findall(r"`([A-Za-z_]\w*)\(", text.text)
        wrong += [f"{text}: {name}" for name in found if name not in all_names()]
    assert not wrong


@cache
def commands() -> set[str]:
    """What one can type after `fsbench`: commands, and those of groups."""
    found = set()
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if not command.hidden:
            found |= {name, *(f"{name} {part}" for part in getattr(command, "commands", ()))}
    return found


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
        named = re.findall(r"(?:[`(]|^)make ([a-z-]+)(?=[`),.:]|$| +#)", text.text, re.MULTILINE)
        wrong += [f"{text}: make {name}" for name in named if name not in targets]
    assert not wrong
