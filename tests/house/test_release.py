"""Check the version, the map of folders in CONTRIBUTING.md, and the contents of a wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from glob import glob
from pathlib import Path

import pytest
from tree import ROOT

import fsbench

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
    newest = re.search(r"^## \[(.+?)\]", text("CHANGELOG.md"), re.MULTILINE)
    cited = re.search(r"^version: (\S+)$", text("CITATION.cff"), re.MULTILINE)
    assert newest and cited
    assert newest[1] == cited[1] == fsbench.__version__


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
    assert {"results.csv", "env.json"} <= {path.name for path in records}
    assert not any(path.suffix == ".jsonl" for path in records)


@pytest.mark.full
def test_the_distributions_install_and_run_the_smoke_preset(tmp_path):
    """`python -m build` makes an sdist and a wheel, and the wheel runs without the checkout."""

    def call(*command: object, **options) -> str:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("fsbench/kernels/fused/api.py") for name in archive.getnames())
    site = tmp_path / "site"
    call(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel)
    env = {**os.environ, "PYTHONPATH": str(site)}
    run = ("-m", "fsbench", "run", "--preset", "smoke", "--batch", "1", "--provider", "multinomial")
    out = call(sys.executable, *run, "--out", "out", cwd=tmp_path, env=env)
    assert "Multinomial" in out
    assert (tmp_path / "out" / "results.csv").is_file()
    imported = call(
        sys.executable, "-c", "import fsbench; print(fsbench.__file__)", cwd=tmp_path, env=env
    )
    assert imported.startswith(str(site))
