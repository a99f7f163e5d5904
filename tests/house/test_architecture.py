"""Check which files may import which. The imports are read from the source; nothing is imported.

Imports inside functions and imports for type checkers count as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from tree import modules

from fsbench.discover import discover
from fsbench.provider import Kind

MODULES = modules()
PACKAGES = {name.rpartition(".")[0] for name in MODULES} - {""}
SAMPLERS = [
    name
    for name in MODULES
    if name.rpartition(".")[0] in ("fsbench.kernels", "fsbench.baselines") and name not in PACKAGES
]
SAMPLER_ROOMS = ("fsbench.kernels", "fsbench.baselines")
HARNESS = [name for name in MODULES if not name.startswith(SAMPLER_ROOMS)]


def imports(tree: ast.AST, typing_too: bool = True) -> Iterator[str]:
    """Yield the dotted names imported anywhere in a module, also inside functions.

    `from package import name` counts as package.name if that is a module, else as package. Lazy
    imports of a package (fsbench.lazy) count as well.
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


def project_imports(name: str) -> set[str]:
    """Return the modules of this project that a module imports."""
    return {each for each in imports(MODULES[name]) if each in MODULES and each != name}


def reached(name: str) -> set[str]:
    """Return everything that running a module can import, transitively, lazy imports included."""
    everything: set[str] = set()
    todo = [name]
    while todo:
        # A package imports lazily what it names for type checkers.
        current = todo.pop()
        for imported in imports(MODULES[current], typing_too=current in PACKAGES):
            if imported not in everything:
                everything.add(imported)
                if imported in MODULES:
                    todo.append(imported)
    return everything


def roots(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def room(name: str) -> str:
    """The folder of a module, or "sampler files"; "" for the files of fsbench/ itself."""
    parts = name.split(".")[1:] or [""]
    if parts[:1] in (["kernels"], ["baselines"]):
        return "sampler files" if name in SAMPLERS else "/".join(parts[:2])
    return parts[0] if f"fsbench.{parts[0]}" in PACKAGES else ""


def test_the_parser_sees_imports_of_every_form():
    tree = ast.parse(
        "import a.b\nfrom fsbench import inputs\nfrom fsbench.errors import FsbenchError\n"
        "if TYPE_CHECKING:\n    import c\n"
        "def f():\n    if x:\n        import d\n"
    )
    assert set(imports(tree)) == {"a.b", "fsbench.inputs", "fsbench.errors", "c", "d"}
    assert "c" not in set(imports(tree, typing_too=False))
    assert {"fsbench.measure.runner", "fsbench.kernels.flash_sampling", "fsbench.cli"} <= set(
        MODULES
    )


GROUND = ("cores", "errors", "lazy", "problem", "provider")
"""The contract: files of fsbench/ that import nothing but each other."""

KERNEL_FLOORS = ("configs", "noise", "checks", "device", "shard", "launch", "fused")
SHARED = {f"kernels/{name}" for name in KERNEL_FLOORS}
FILTERED = SHARED | {"kernels/screened", "kernels/truncated"}
FLOORS: dict[str, set[str]] = {
    # Rooms of kernels/, each with the rooms below it. Features do not import each other, but
    # screened imports truncated.
    **{
        f"kernels/{name}": {f"kernels/{below}" for below in KERNEL_FLOORS[:floor]}
        for floor, name in enumerate(KERNEL_FLOORS)
    },
    "kernels/truncated": SHARED,
    "kernels/screened": SHARED | {"kernels/truncated"},
    "kernels/scoring": SHARED,
    "kernels/drafting": FILTERED,
    "kernels/warming": SHARED | {"kernels/truncated"},
    "kernels/providing": FILTERED,
    "kernels": FILTERED | {"kernels/scoring", "kernels/drafting"},
    "baselines": set(),
    "baselines/providing": {"simple"},
    # fsbench/
    "reference": set(),
    "machine": set(),
    "records": set(),
    "timers": set(),
    "paper": set(),
    "simple": {"reference", "records"},
    "report": {"records", "paper", "simple"},
    "verify": {"reference"},
    "measure": {"verify", "reference", "timers", "machine", "records"},
    "integrations": {"kernels", "kernels/warming", "machine"},
    "e2e": {"integrations", "records", "machine", "paper"},
    "cli": {
        *("e2e", "measure", "verify", "report", "simple"),
        *("records", "paper", "timers", "machine", "integrations"),
        "kernels/warming",  # one command: see KERNELS_OF_COMMANDS
    },
}
"""Room -> the rooms that its files may import, in addition to the contract and itself."""

FEATURES = {
    *("kernels/fused", "kernels/screened", "kernels/truncated", "kernels/scoring"),
    "kernels/drafting",
}
"""Rooms of kernels/ with a public call, which may run the reference."""

UPPER = {
    "verify": {"inputs", "graphs"},
    "measure": {"inputs", "graphs", "discover"},
    "integrations": {"discover"},
    "cli": {"discover", "interrupts"},
}
"""Room -> files of fsbench/ above the contract that it may import."""


def may_import(name: str, imported: str) -> bool:
    """Whether FLOORS and UPPER let a module of a room import another module of the project."""
    importer, target = room(name), room(imported)
    if target == importer or imported == f"fsbench.{importer.replace('/', '.')}":
        return True
    if target:
        return target in FLOORS[importer] | ({"reference"} if importer in FEATURES else set())
    allowed = {*GROUND, *UPPER.get(importer, ()), *([""] if importer == "cli" else [])}
    # The version is a fact of the package itself.
    allowed |= {""} if name == "fsbench.machine.environment" else set()
    return imported.removeprefix("fsbench").removeprefix(".") in allowed


def test_a_room_imports_what_is_below_it():
    assert not [
        f"{name} imports {imported}"
        for name in MODULES
        if room(name) not in ("", "sampler files")  # sampler files have a separate test
        for imported in project_imports(name)
        if not may_import(name, imported)
    ]


def test_every_room_has_a_floor_and_says_what_it_is_for():
    rooms = {room(name) for name in MODULES} - {"", "sampler files"}
    assert rooms == set(FLOORS)
    for package in sorted(PACKAGES):
        purpose = ast.get_docstring(MODULES[package]) or ""
        assert len(purpose.split()) >= 5, f"{package} does not say what it is for"


def test_imports_have_no_cycle():
    above: dict[str, set[str]] = {name: project_imports(name) for name in MODULES}
    while above:
        ground = {name for name, below in above.items() if not below & set(above)}
        assert ground, f"a cycle among {sorted(above)}"
        above = {name: below for name, below in above.items() if name not in ground}


def test_the_contract_is_the_ground():
    assert project_imports("fsbench.errors") == set()
    assert project_imports("fsbench.lazy") == set()
    assert project_imports("fsbench.problem") == {"fsbench.errors"}
    assert project_imports("fsbench.provider") == {"fsbench.errors", "fsbench.problem"}
    for stem in GROUND:
        assert not roots(set(imports(MODULES[f"fsbench.{stem}"], False))) & {"torch", "triton"}
    assert project_imports("fsbench.inputs") | project_imports("fsbench.graphs") <= {
        *("fsbench.errors", "fsbench.problem", "fsbench.provider")
    }


def test_a_sampler_imports_the_contract_and_its_own_packages_rooms():
    contract = {"fsbench.errors", "fsbench.problem", "fsbench.provider"}
    wrong = []
    for name in SAMPLERS:
        package = name.rpartition(".")[0]
        for imported in project_imports(name) - contract:
            if package == "fsbench.baselines" and room(imported) == "simple":
                continue  # the CPU decision plane is a library that baselines wrap
            if not imported.startswith(f"{package}.") or imported in SAMPLERS:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


ABOVE_FEATURES = ("", "sampler files", "kernels/providing", "kernels/drafting", "kernels/warming")


def test_features_meet_at_their_api_or_launch():
    """Device code that two features need is in device/ or noise/."""
    wrong = []
    for name in MODULES:
        importer = room(name)
        if not name.startswith("fsbench.kernels.") or importer in ABOVE_FEATURES:
            continue
        for imported in project_imports(name):
            target = room(imported)
            file = imported.removeprefix(f"fsbench.{target.replace('/', '.')}").strip(".")
            if target in FEATURES - {importer} and file not in ("", "api", "launch"):
                wrong.append(f"{name} imports {imported}")
    assert not wrong


@pytest.mark.parametrize("feature", ["fused", "screened"])
def test_the_portable_and_the_hopper_kernel_do_not_know_each_other(feature):
    package = f"fsbench.kernels.{feature}"
    hopper = {name for name in MODULES if name.startswith(f"{package}.hopper")}
    assert f"{package}.hopper.kernel" in hopper
    for name in hopper:
        assert f"{package}.portable" not in project_imports(name)
    assert not project_imports(f"{package}.portable") & hopper


def test_a_file_at_the_top_defines_a_provider_and_a_package_never_does():
    for name, tree in MODULES.items():
        if not name.startswith(SAMPLER_ROOMS):
            continue
        targets = [
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        assert ("PROVIDER" in targets) == (name in SAMPLERS), name


INTEGRATIONS = [name for name in HARNESS if name.startswith("fsbench.integrations")]
"""Integrations into engines: they use the kernels through the public API, as any user does."""

WARMING = [f"fsbench.kernels.warming.{name}" for name in ("offline", "absent_ranks")]
"""Modules that compile for engines."""


def test_integrations_use_what_is_public():
    assert not [
        f"{name} imports {imported}"
        for name in INTEGRATIONS
        for imported in project_imports(name)
        if imported.startswith(SAMPLER_ROOMS) and imported not in ("fsbench.kernels", *WARMING)
    ]


KERNELS_OF_COMMANDS = {"fsbench.cli.warm": {"fsbench.kernels.warming.offline"}}
"""Command -> the modules of kernels/ that it imports. It compiles and measures nothing."""


def test_only_discovery_knows_the_packages_of_samplers():
    wrong = []
    for name in set(HARNESS) - set(INTEGRATIONS):
        spelled = {each for each in imports(MODULES[name]) if each.startswith(SAMPLER_ROOMS)}
        spelled -= KERNELS_OF_COMMANDS.get(name, set())
        if name != "fsbench.discover":
            spelled |= {text for text in literals(MODULES[name]) if text.startswith(SAMPLER_ROOMS)}
        wrong += [f"{name} names {each}" for each in spelled]
    assert not wrong


READERS = ("fsbench.records", "fsbench.report", "fsbench.paper")


READING_FILES = (
    *(f"fsbench.e2e.{stem}" for stem in ("records", "summary", "tables")),
    *(f"fsbench.cli.{stem}" for stem in ("plot", "iomodel", "compare", "report", "attribution")),
    "fsbench.simple.pipeline",
)


def test_readers_of_results_need_no_sampler_and_no_gpu():
    heavy = ("torch", "triton", "flashinfer", "cupti", "pynvml")
    measuring = ("fsbench.discover", "fsbench.measure", "fsbench.timers")
    assert not [
        f"{name} reaches {each}"
        for name in [*(name for name in MODULES if name.startswith(READERS)), *READING_FILES]
        for each in reached(name)
        if each.split(".")[0] in heavy or each.startswith(measuring)
    ]


# -- Lazy imports


def _may_import_lazily(name: str) -> bool:
    """Return whether a module may import inside functions, because listing samplers loads it."""
    return (
        name in SAMPLERS
        or name.startswith(("fsbench.kernels.providing", "fsbench.baselines.providing"))
        or name.startswith("fsbench.cli")
    )


def _inside_functions(tree: ast.AST, inside: bool = False) -> Iterator[ast.stmt]:
    for node in ast.iter_child_nodes(tree):
        if inside and isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _inside_functions(node, inside or function)


def test_imports_are_at_the_top_except_in_samplers_and_commands():
    assert not [
        f"{name}: {ast.unparse(node)}"
        for name in MODULES
        if not _may_import_lazily(name)
        for node in _inside_functions(MODULES[name])
    ]


def test_samplers_and_command_line_are_listed_without_torch():
    """Nothing that `fsbench --help` or `list` loads imports torch at module level."""

    def at_once(name: str) -> set[str]:
        nodes = [n for n in MODULES[name].body if isinstance(n, ast.Import | ast.ImportFrom)]
        direct = set(imports(ast.Module(list(nodes), [])))
        # The packages of a module are imported with it.
        parents = {each.rsplit(".", k)[0] for each in direct & set(MODULES) for k in (1, 2)}
        return direct | (parents & set(MODULES))

    for start in [*SAMPLERS, "fsbench.cli", "fsbench.discover"]:
        seen, todo = {start}, [start]
        while todo:
            for imported in at_once(todo.pop()) - seen:
                seen.add(imported)
                if imported in MODULES:
                    todo.append(imported)
        assert not roots(seen) & {"torch", "flashinfer", "cupti", "pandas", "matplotlib"}, start


# -- Names


def test_no_private_name_is_imported_across_files():
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsbench"):
                private = [a.name for a in node.names if re.match(r"_[^_]", a.name)]
                assert not private, f"{name}: {private}"


def literals(tree: ast.AST) -> Iterator[str]:
    """Yield the string literals of code: no docstrings, of modules or of variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            continue  # a docstring, or a string that documents a variable
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and isinstance(child.value, str):
                yield child.value


PROVIDERS = set(discover()) - {str(kind) for kind in Kind}  # "greedy" is also a kind


def test_literals_leave_out_docstrings():
    tree = ast.parse(
        '"""doc"""\nx = "a"\n"""about x"""\ndef f():\n    "doc"\n    g(f"b{x}", k="c")'
    )
    assert sorted(literals(tree)) == ["a", "b", "c"]


def test_the_harness_never_spells_a_providers_name():
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, sorted(PROVIDERS)))})\b")
    assert not [
        f"{name}: {text!r}"
        for name in HARNESS
        for text in literals(MODULES[name])
        if pattern.search(text)
    ]
