"""Check the version, the map of folders in CONTRIBUTING.md, and that distributions are whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from datetime import date
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from tree import ROOT

import fsbench
from fsbench.records.summary import read_csv

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = ("fsbench", "kernels", "baselines")
"""Folders of product code; the latter two are links in the first, too."""


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code(folder: str) -> list[Path]:
    """Python files of a folder of the checkout; links are not followed."""
    return [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]


def test_the_version_has_one_source():
    assert "version" not in PYPROJECT["project"]
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    attribute = PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]
    assert attribute == {"attr": "fsbench.__version__"}


def test_only_the_recording_environment_pins_a_package():
    """An exact version in an extra that users install would replace the one of their engine."""
    project = PYPROJECT["project"]
    groups = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    pins = {
        name: [each for each in requirements if "==" in each.split(";")[0]]
        for name, requirements in groups.items()
    }
    assert {name for name, pinned in pins.items() if pinned} == {"docs", "record"}


def test_changelog_and_citation_are_of_this_version():
    newest = re.search(r"^## \[(.+?)\] - (.+)$", text("CHANGELOG.md"), re.MULTILINE)
    cited = re.search(r"^version: (\S+)$", text("CITATION.cff"), re.MULTILINE)
    released = re.search(r"^date-released: (\S+)$", text("CITATION.cff"), re.MULTILINE)
    assert newest and cited and released
    assert newest[1] == cited[1] == fsbench.__version__
    assert newest[2] == released[1] == date.fromisoformat(released[1]).isoformat()


def test_the_changelog_has_the_form_of_keep_a_changelog():
    changelog = text("CHANGELOG.md")
    releases = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    days = [re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d)", each) for each in releases]
    assert all(days), releases
    assert sorted((day[1] for day in days if day), reverse=True) == [day[1] for day in days if day]
    sections = set(re.findall(r"^### (.*)$", changelog, re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_citation_is_of_the_paper_that_the_tables_are_from():
    paper = tomllib.loads(text("fsbench/paper/paper.toml"))
    cited = text("CITATION.cff")
    assert f'title: "{paper["title"]}"' in cited
    names = re.findall(r"family-names: (\S+)", cited)
    assert names == paper["authors"].split(", ")
    assert f"repository-code: {paper['url']}" in cited


def rooms() -> set[str]:
    """Return the folders of code, one level deep, tests included."""
    top_level = [ROOT / folder for folder in (*PACKAGES, "tests")]
    below = [path for top in top_level for path in top.iterdir() if not path.is_symlink()]
    folders = [path for path in [*top_level, *below] if path.is_dir()]
    return {path.relative_to(ROOT).as_posix() for path in folders if list(path.rglob("*.py"))}


def test_contributing_is_short_and_has_every_room():
    page = text("CONTRIBUTING.md")
    assert len(page.splitlines()) <= 100
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = [name.rstrip("/") for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(listed) == len(set(listed))
    assert set(listed) == rooms() - {"tests"}


def test_ci_runs_every_test_that_needs_no_gpu():
    marks = dict(re.findall(r'^([a-z-]+): setup\n\t\$\(ON_CPU\) -m "(.+)"', text("Makefile"), re.M))
    assert marks == {
        "test": "not gpu$(if $(T),, and not full)",  # T: one folder or file, slow tests included
        "test-all": "not gpu",
    }
    assert text(".ci/run").endswith("make -j 2 lint site  # each uses one core\nmake test-all\n")
    assert "- run: bash .ci/run" in text(".github/workflows/test.yml")


def test_every_folder_of_code_is_a_package():
    """setup.py installs packages; a folder without an __init__ would be left out."""
    for folder in PACKAGES:
        for path in code(folder):
            assert (path.parent / "__init__.py").exists(), path


def test_every_data_file_is_installed():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["fsbench"]
    installed = {
        Path(file).resolve()
        for pattern in patterns
        for file in glob(str(ROOT / "fsbench" / pattern), recursive=True)
    }
    data_files = {
        path.resolve()
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix not in (".py", ".pyc", ".so") and path.is_file()
    }
    records = {path for path in installed if path.is_relative_to(ROOT / "results")}
    assert data_files == installed - records
    assert {path.name for path in records} == {"results.csv", "env.json"}


def call(*command: object, **options: Any) -> str:
    """Run a command; return its output, or fail with it."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git tracks or would add: no leftover of a build gets into ours."""
    copy = tmp_path_factory.mktemp("tree")
    listed = call("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in listed.rstrip("\0").split("\0"):
        if os.path.lexists(ROOT / name):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


def built(kind: str, source: Path, folder: Path) -> Path:
    """Build an sdist or a wheel by `python -m build`; return the only file in `folder`."""
    call(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "-o", folder, source)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the sdist: a file that either leaves out is missing here."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(built("sdist", tree, tmp_path_factory.mktemp("sdist"))) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.mark.full
def test_the_wheel_has_every_file_of_the_packages(tree, wheel):
    files = [path for folder in PACKAGES for path in (tree / folder).rglob("*.*") if path.is_file()]
    files += [*(tree / "results").rglob("results.csv"), *(tree / "results").rglob("env.json")]
    names = {path.relative_to(tree).as_posix() for path in files}
    expected = {f"fsbench/{name.removeprefix('fsbench/')}" for name in names}
    metadata = f"fsbench-{fsbench.__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.startswith(metadata)}
        core = {name for name in packed if re.fullmatch(r"fsbench/simple/_native\..+\.so", name)}
        assert len(core) == 1 and packed - core == expected
        for name in names:
            in_wheel = f"fsbench/{name.removeprefix('fsbench/')}"
            assert archive.read(in_wheel) == (tree / name).read_bytes(), name


@pytest.mark.full
def test_the_wheel_runs_the_smoke_preset_in_a_fresh_environment(wheel, tmp_path):
    """Outside the checkout. torch and the others are those of the tests, not downloaded."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    installing = ("install", "-q", "--no-deps", "--no-index", wheel)
    call(sys.executable, "-m", "pip", "--python", python, *installing)
    (site,) = environment.glob("lib/python*/site-packages")
    # A path of a .pth file comes after `site`, and .pth files in it, as of an editable fsbench,
    # have no effect.
    (site / "packages-of-the-tests.pth").write_text(sysconfig.get_path("purelib"), "utf-8")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    imported = call(python, "-c", "import fsbench; print(fsbench.__file__)", cwd=tmp_path, env=env)
    assert imported.startswith(str(site))
    command = environment / "bin" / "fsbench"
    out = call(command, "run", "--preset", "smoke", "--out", "out", cwd=tmp_path, env=env)
    assert "Multinomial" in out
    results = read_csv(tmp_path / "out")
    assert len(results) and set(results.status) == {"ok"}
    assert results.median_us.gt(0).all()
