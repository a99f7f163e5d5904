"""Who may import what (CONTRIBUTING.md), read from the source: nothing is imported here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from tree import ROOT

from fsbench.discover import discover
from fsbench.provider import Kind

FOLDERS = {"fsbench": "fsbench", "fsbench.kernels": "kernels", "fsbench.baselines": "baselines"}
"""Package -> folder, as pyproject.toml installs them."""


def _modules() -> dict[str, ast.Module]:
    """Every module of the project by its dotted name; a package under its own name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


MODULES = _modules()
SAMPLERS = [name for name in MODULES if name.startswith(("fsbench.kernels.", "fsbench.baselines."))]
HARNESS = [
    name for name in MODULES if not name.startswith(("fsbench.kernels", "fsbench.baselines"))
]


def imports(tree: ast.AST, typing_too: bool = True) -> Iterator[str]:
    """Dotted names imported anywhere in a module, also inside functions.

    `from package import name` counts as package.name where that is a module, else as package.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            if typing_too:
                yield from imports(ast.Module(node.body, []))
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
        else:
            yield from imports(node, typing_too)


def own(name: str, typing_too: bool = True) -> set[str]:
    """The project's modules that a module imports."""
    return {found for found in imports(MODULES[name], typing_too) if found in MODULES}


def reached(name: str) -> set[str]:
    """Everything that running a module can import: transitively, lazy imports included."""
    everything: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        for found in imports(MODULES[current], typing_too=False):
            if found not in everything:
                everything.add(found)
                if found in MODULES:
                    todo.append(found)
    return everything


def roots(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_the_parser_sees_imports_of_every_form():
    tree = ast.parse(
        "import a.b\nfrom fsbench import runner\nfrom fsbench.errors import FsbenchError\n"
        "if TYPE_CHECKING:\n    import c\n"
        "def f():\n    if x:\n        import d\n"
    )
    assert set(imports(tree)) == {"a.b", "fsbench.measure.runner", "fsbench.errors", "c", "d"}
    assert "c" not in set(imports(tree, typing_too=False))
    assert {"fsbench.measure.runner", "fsbench.kernels.flash_sampling", "fsbench.cli"} <= set(
        MODULES
    )


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_imports_the_contract_and_its_own_helpers_only(name):
    package, stem = name.rsplit(".", 1)
    # The reference is what a sampler runs on a CPU, where it has no kernel.
    allowed = {"fsbench.errors", "fsbench.problem", "fsbench.provider", "fsbench.reference"}
    # The CPU decision plane is a library of its own, which the baselines only present.
    allowed |= {found for found in MODULES if found.startswith("fsbench.simple.")}
    for found in own(name) - allowed:
        other_package, other = found.rsplit(".", 1)
        assert other_package == package, f"{stem} imports {found}"
        assert other.startswith("_"), f"{stem} imports the sampler {other}"


INTEGRATIONS = [name for name in HARNESS if name.startswith("fsbench.integrations")]
"""What puts flash_sample into an engine: users of the kernels, as anyone outside is."""


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_integrations_use_what_is_public(name):
    assert {"fsbench.kernels"} >= {f for f in own(name) if f.startswith("fsbench.kernels")}
    assert not [found for found in own(name) if found.startswith("fsbench.baselines")]


@pytest.mark.parametrize("name", [name for name in HARNESS if name not in INTEGRATIONS])
def test_only_discovery_knows_the_packages_of_samplers(name):
    packages = ("fsbench.kernels", "fsbench.baselines")
    assert not [found for found in imports(MODULES[name]) if found.startswith(packages)]
    if name != "fsbench.discover":
        named = [text for text in literals(MODULES[name]) if text.startswith(packages)]
        assert not named


def test_the_contract_is_a_leaf():
    assert own("fsbench.errors") == set()
    assert own("fsbench.problem") == {"fsbench.errors"}
    assert own("fsbench.provider") == {"fsbench.errors", "fsbench.problem"}
    for name in ("fsbench.errors", "fsbench.problem", "fsbench.provider"):
        assert not roots(set(imports(MODULES[name], typing_too=False))) & {"torch", "triton"}


LAYERS = (
    {"cli", "__main__"},
    {"runner", "preparing", "plan", "tuning", "ranks", "e2e"},
    {"integrations"},
    {
        *("discover", "verify", "inputs", "graphs", "timers", "reference", "simple"),
        *("diagnosis", "environment"),
    },
)
"""Top down: nothing below imports anything above it."""


@pytest.mark.parametrize("name", HARNESS)
def test_imports_point_downwards(name):
    def layer(module: str) -> int:
        part = module.removeprefix("fsbench").removeprefix(".").split(".")[0]
        return next((i for i, parts in enumerate(LAYERS) if part in parts), len(LAYERS))

    assert not [found for found in own(name) if layer(found) < layer(name)]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "fsbench.figures.configuration",
            "fsbench.figures.parts",
            "fsbench.figures.style",
            "fsbench.analysis.tables",
            "fsbench.records.summary",
        ),
        *(
            "fsbench.records.store",
            "fsbench.records.iomodel",
            "fsbench.analysis.doubts",
            "fsbench.records.stats",
        ),
        *("fsbench.analysis.attribution", "fsbench.analysis.recommend", "fsbench.cli.attribution"),
        *("fsbench.figures.report", "fsbench.figures.winners", "fsbench.cli.report"),
        *("fsbench.analysis.scaling", "fsbench.figures.scaling"),
        *(
            "fsbench.e2e.records",
            "fsbench.e2e.summary",
            "fsbench.e2e.tables",
            "fsbench.figures.end_to_end",
        ),
        *("fsbench.figures.hotvocab", "fsbench.simple.pipeline", "fsbench.cli.hotvocab.pipeline"),
        *("fsbench.cli.plot", "fsbench.cli.iomodel", "fsbench.cli.compare"),
        *(name for name in MODULES if re.match(r"fsbench\.(compare|paper|plots)\b", name)),
    ],
)
def test_what_reads_results_needs_no_sampler_and_no_gpu(name):
    found = reached(name)
    assert not roots(found) & {"torch", "triton", "flashinfer", "cupti", "pynvml"}
    # provider is a leaf, used for Kind.
    assert {"fsbench.discover", "fsbench.measure.runner", "fsbench.timers"}.isdisjoint(found)


def test_samplers_and_command_line_are_listed_without_torch():
    """Lazily, at most: the module level of what `fsbench --help` and `list` load.

    A sampler's private helpers may import torch, if it imports them lazily (test_startup.py).
    """

    def module_level(name: str) -> set[str]:
        found = set()
        for node in MODULES[name].body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= set(imports(ast.Module([node], [])))
        return found

    public = [name for name in SAMPLERS if not name.rsplit(".", 1)[1].startswith("_")]
    for name in [*public, *(name for name in MODULES if name.startswith("fsbench.cli"))]:
        assert not roots(module_level(name)) & {"torch", "flashinfer", "cupti"}, name


def literals(tree: ast.AST) -> Iterator[str]:
    """String literals of code: no docstrings, no bare strings that document a variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            continue  # a docstring, or a string that documents a variable
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and isinstance(child.value, str):
                yield child.value


PROVIDERS = set(discover()) - {str(kind) for kind in Kind}  # "greedy" is also a kind


def test_literals_are_those_of_code():
    tree = ast.parse(
        '"""doc"""\nx = "a"\n"""about x"""\ndef f():\n    "doc"\n    g(f"b{x}", k="c")'
    )
    assert sorted(literals(tree)) == ["a", "b", "c"]


@pytest.mark.parametrize("name", HARNESS)
def test_the_harness_never_spells_a_providers_name(name):
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, sorted(PROVIDERS)))})\b")
    assert not [text for text in literals(MODULES[name]) if pattern.search(text)]


def test_every_package_is_installed():
    """A wheel has what the checkout has."""
    import tomllib

    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = set(FOLDERS)
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            packages.add(".".join([package, *parts]))
    assert set(config["packages"]) == packages
    data = {
        path
        for package, patterns in config["package-data"].items()
        for pattern in patterns
        for path in (ROOT / config["package-dir"].get(package, package.replace(".", "/"))).glob(
            pattern
        )
    }
    files = {path for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*.*")}
    assert data == {path for path in files if path.suffix not in (".py", ".pyc", ".so")}
