"""Discovery: what is shipped, what others add, and what is broken."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from plug_in import plug_in
from tree import ROOT

from fsbench import discover as module
from fsbench.discover import ENTRY_POINTS, Found, available, discover, select
from fsbench.errors import InvalidArgument, ProviderUnavailable
from fsbench.machine import hardware
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider


def _provider(name: str = "mine", **changes) -> Provider:
    return Provider(name, "Mine", Kind.EXACT, lambda problem, weight: None, **changes)


@pytest.fixture
def plugin(tmp_path: Path):
    """Writes a plug-in file and returns its path."""

    def write(text: str = plug_in("mine"), name: str = "mine") -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def entry_points(monkeypatch, tmp_path):
    """Installs entry points: name -> the text of the module that it names."""

    def install(**texts: str) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        for name, text in texts.items():
            (tmp_path / f"package_{name}.py").write_text(text)
        points = [EntryPoint(name, f"package_{name}:PROVIDER", ENTRY_POINTS) for name in texts]
        groups = {ENTRY_POINTS: points}
        monkeypatch.setattr(module, "entry_points", lambda group: groups.get(group, []))

    return install


def test_every_file_is_a_sampler_sorted_by_name():
    files = [*(ROOT / "kernels").glob("[!_]*.py"), *(ROOT / "baselines").glob("[!_]*.py")]
    result = discover()
    assert list(result) == sorted(path.stem for path in files)
    for name, entry in result.items():
        assert entry.provider is not None and entry.provider.name == entry.name == name
        assert entry.source in (f"fsbench.kernels.{name}", f"fsbench.baselines.{name}")


def test_a_file_adds_its_sampler_or_several(plugin):
    result = discover([plugin()])
    assert set(result) - set(discover()) == {"mine"}
    assert result["mine"].provider.label == "mine" and result["mine"].source.endswith("mine.py")
    text = "".join(plug_in(name).replace("PROVIDER =", f"{name} =") for name in ("one", "two"))
    result = discover([plugin(f"{text}PROVIDERS = (one, two)\n")])
    assert set(result) - set(discover()) == {"one", "two"}
    assert result["one"].provider.name == "one" and result["two"].source.endswith("mine.py")
    with pytest.raises(InvalidArgument, match="'one': defined twice"):
        discover([plugin(f"{text}PROVIDERS = (one, one)\n", "twice")])


BROKEN = {
    "raise RuntimeError('two\\nlines')": "RuntimeError: two lines",
    "import sys; sys.exit(0)": "SystemExit: 0",
    "raise ValueError('\\x1b[31m \\udc80 \\0')": "ValueError: ?[31m \\udc80 ?",
    "raise type('A\\nB', (Exception,), {})('x' * 10**6)": "A B: xxx",
    "import no_such_package": "ModuleNotFoundError: No module named 'no_such_package'",
    "1 +": "SyntaxError: ",
    "PROVIDER = 'mine'": "defines no PROVIDER of type fsbench.provider.Provider",
    "import sys; sys.modules[__name__] = None": "defines no PROVIDER",
    plug_in("other"): "PROVIDER is named 'other', not 'mine'",
    plug_in().replace("build=build,", "build=build, kept_bytes=lambda problem: -1,"): (
        "InvalidArgument: kept_bytes: expected bytes; got -1"
    ),
    "PROVIDERS = ()": "PROVIDERS: expected a tuple of fsbench.provider.Provider",
    f"{plug_in()}PROVIDERS = (PROVIDER, 1)": "PROVIDERS: expected a tuple",
    f"{plug_in()}PROVIDERS = (PROVIDER,)": "defines both PROVIDER and PROVIDERS",
}
"""Source of a plug-in -> start of the reason against it."""


@pytest.mark.parametrize(("text", "reason"), BROKEN.items(), ids=range(len(BROKEN)))
def test_a_broken_file_is_unavailable_until_it_is_mended(plugin, text, reason):
    entry = discover([plugin(text)])["mine"]
    assert entry.provider is None and entry.broken.startswith(reason), entry.broken
    assert entry.broken.isprintable() and len(entry.broken) < 400
    assert entry.unavailable_reason("cpu") == entry.unavailable_reason("cuda") == entry.broken
    assert entry.refusal(Problem(1, 2, 3)) == ("unavailable", entry.broken)
    with pytest.raises(ProviderUnavailable, match="mine: "):
        available(entry, "cpu")
    assert discover([plugin()])["mine"].provider is not None


def test_a_plug_in_prints_to_stderr(plugin, capfd):
    lines = "import os; print('words'); os.write(1, b'words'); os.chdir('/'); sys.stdout = None\n"
    before = os.getcwd(), sys.stdout
    assert discover([plugin(plug_in() + lines)])["mine"].provider is not None
    assert (os.getcwd(), sys.stdout) == before
    assert "words" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "exact"),
        ("presets", ("papre",)),
        ("devices", "cuda"),
        ("devices", ("tpu",)),
        ("dtypes", ("fp8",)),
        ("filters", ("top_q",)),
        ("filter_order", ("top_k", "temp")),
        ("quantized", ("int4",)),
        ("ties", "last"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_its_field(field, value):
    changed = {field: value}
    if field not in ("kind", "presets"):
        changed = {"capabilities": Capabilities(**changed)}
    with pytest.raises(InvalidArgument, match=f"^mine: {field}: expected .*; got "):
        replace(_provider(), **changed)


@pytest.mark.parametrize("name", ["missing.py", "text.txt", "folder.py"])
def test_a_path_that_is_no_python_file_is_refused(tmp_path, name):
    (tmp_path / "text.txt").write_text("")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(InvalidArgument, match=r"--provider-path: expected an existing \.py file"):
        discover([tmp_path / name])


def test_two_samplers_of_one_name_are_refused_with_both_places(plugin, entry_points):
    shipped = next(iter(discover()))
    path = plugin(plug_in(shipped), shipped)
    with pytest.raises(InvalidArgument, match=rf"{shipped}.*twice.*fsbench\..* and .*{path}"):
        discover([path])
    with pytest.raises(InvalidArgument, match="'mine': defined twice"):
        discover([plugin(), plugin()])
    entry_points(mine=plug_in("mine"))
    with pytest.raises(
        InvalidArgument, match=r"twice, in entry point package_mine:PROVIDER and .*mine\.py"
    ):
        discover([plugin()])


def test_entry_points(entry_points):
    shipped = next(iter(discover()))
    entry_points(
        **{"mine": plug_in("mine"), shipped: plug_in(shipped)},
        bad="raise ImportError('no lib')",
        renamed=plug_in("other"),
    )
    result = discover()
    assert result["mine"].provider.name == "mine"
    assert result["bad"].broken == "ImportError: no lib"
    assert result["renamed"].broken == "PROVIDER is named 'other', not 'renamed'"
    twice = result[f"{shipped} (entry point package_{shipped}:PROVIDER)"].broken
    assert twice.startswith(f"defined twice, in {result[shipped].source} and entry point")


def test_our_own_module_without_a_package_is_broken_but_a_bug_of_ours_is_raised(monkeypatch):
    name = next(name for name, entry in discover().items() if "baselines" in entry.source)
    real = importlib.import_module

    def fail_with(error):
        def import_module(module_name):
            if module_name.endswith(f".{name}"):
                raise error
            return real(module_name)

        monkeypatch.setattr(module.importlib, "import_module", import_module)

    fail_with(ModuleNotFoundError("No module named 'foo'", name="foo"))
    assert discover()[name].broken == "package foo is not installed"
    for bug in (
        ModuleNotFoundError("No module named 'fsbench.foo'", name="fsbench.foo"),
        ImportError("cannot import name"),
        SyntaxError("typo"),
    ):
        fail_with(bug)
        with pytest.raises(type(bug)):
            discover()


def test_availability(monkeypatch):
    def reasons(**changes):
        entry = Found("mine", "here", _provider(**changes))
        return entry.unavailable_reason("cuda"), entry.unavailable_reason("cpu")

    both = Capabilities(devices=("cuda", "cpu"))
    monkeypatch.setattr(hardware, "gpus", lambda: [])
    assert reasons(capabilities=both) == ("no GPU on this machine", None)
    assert reasons() == ("no GPU on this machine", "runs on cuda only")
    monkeypatch.setattr(hardware, "gpus", lambda: [hardware.Gpu(0, "A100", "", None, "", (8, 0))])
    assert reasons(compute_capability=(8, 0))[0] is None
    assert reasons(compute_capability=(9, 0))[0] == "needs a GPU of compute capability 9.0"
    assert reasons(capabilities=both) == (None, None)
    absent = "package no_such_package, another_one is not installed"
    packages = ("no_such_package", "json", "another_one")
    assert reasons(capabilities=both, requires=packages) == (absent, absent)
    assert "no_such_package" in reasons(requires=("no_such_package.part",))[0]


def test_refusal_names_the_status(monkeypatch):
    def crash(problem):
        raise KeyError("oops")

    on_cpu = Capabilities(devices=("cpu",))
    problem = Problem(1, 2, 3, device="cpu")

    def refusal(problem=problem, **changes):
        return Found("mine", "", _provider(capabilities=on_cpu, **changes)).refusal(problem)

    assert refusal() is None
    assert refusal(supports=lambda problem: "V too small") == ("unsupported", "V too small")
    assert refusal(supports=crash) == ("error", "KeyError: 'oops'")
    reason = "takes bf16, fp16, not fp32"
    assert refusal(Problem(1, 2, 3, "fp32", device="cpu")) == ("unsupported", reason)
    assert refusal(Problem(1, 2, 3, temperature=0.0, device="cpu"))[0] == "unsupported"
    assert refusal(requires=("no_such_package",))[0] == "unavailable"


def test_select():
    result = {name: Found(name, "") for name in ("alpha", "beta", "gamma")}
    assert [entry.name for entry in select(result, ["gamma", "alpha"])] == ["gamma", "alpha"]
    with pytest.raises(
        InvalidArgument, match=r"^--provider: .* got 'gama'; did you mean 'gamma'\?$"
    ):
        select(result, ["alpha", "gama"])
    with pytest.raises(InvalidArgument, match=r"got 'xyzzy'$"):
        select(result, ["xyzzy"])


def test_an_unknown_name_comes_with_the_fault_of_a_file_that_may_have_it(tmp_path):
    (tmp_path / "mine.py").write_text("PROVIDERS = [1]\n")
    with pytest.raises(InvalidArgument, match=r"got 'one'; .*mine\.py: PROVIDERS: expected"):
        select(discover([tmp_path / "mine.py"]), ["one"])
