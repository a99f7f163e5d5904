"""Compare what fsbench calls in other packages with their real source (`make check-engines`).

    python tools/check_engines.py [--source vllm-0.26.0=FOLDER ...]

Downloads each wheel (up to 300 MB) from the package index, keeps its Python files in build/engines,
and reads signatures, fields and attributes without importing the package. They must be those that
the adapter of fsbench.integrations expects, and take what baselines give (RIVALS). Prints a line
for each difference; exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from fsbench.integrations.vllm_0_26 import EXPECTED
from fsbench.integrations.vllm_expected import ExpectedApi, differences

KEPT = {
    "vllm": ("vllm/v1/", "vllm/distributed/", "vllm/model_executor/layers/", "vllm/engine/"),
    "flashinfer-python": ("flashinfer/sampling", "flashinfer/cake_sampling"),
}
FOLDER = Path("build/engines")


_SAMPLE = "vllm.v1.worker.gpu.sample"
_FLASHINFER = {
    "flashinfer.sampling:sampling_from_logits": ("logits", "indices", "seed", "offset"),
    "flashinfer.sampling:sampling_from_probs": ("probs", "seed", "offset"),
    "flashinfer.sampling:softmax": ("logits", "temperature"),
    "flashinfer.sampling:top_k_top_p_sampling_from_logits": (
        *("logits", "top_k", "top_p", "indices", "seed", "offset"),
    ),
    "flashinfer.sampling:top_k_top_p_sampling_from_probs": (
        *("probs", "top_k", "top_p", "filter_apply_order", "seed", "offset"),
    ),
}


@dataclass(frozen=True)
class Rival:
    """A release that baselines call.

    calls: function -> the parameters that are given to it; those without a default must be among
        them. attributes: as of ExpectedApi.
    """

    package: str
    version: str
    calls: dict[str, tuple[str, ...]]
    attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)


RIVALS = (
    Rival(
        "vllm",
        "0.26.0",
        {
            "vllm.v1.worker.gpu.states:RequestState.__init__": (
                *("max_num_reqs", "max_model_len", "max_num_batched_tokens"),
                *("num_speculative_steps", "vocab_size", "device"),
            ),
            f"{_SAMPLE}.sampler:Sampler.__init__": (
                *("max_num_reqs", "vocab_size", "device", "req_states", "logprobs_mode"),
            ),
            f"{_SAMPLE}.sampler:Sampler.add_request": ("req_idx", "prompt_len", "sampling_params"),
            f"{_SAMPLE}.sampler:Sampler.apply_staged_writes": (),
            f"{_SAMPLE}.sampler:Sampler.sample": (
                *("logits", "expanded_idx_mapping", "idx_mapping_np", "pos", "input_ids"),
                *("expanded_local_pos", "return_logprobs"),
            ),
            f"{_SAMPLE}.logprob:compute_token_logprobs": ("logits", "token_ids"),
        },
        attributes={
            f"{_SAMPLE}.sampler:Sampler": ("use_flashinfer", "sampling_states"),
            f"{_SAMPLE}.states:SamplingStates": ("seeds",),
        },
    ),
    Rival("flashinfer-python", "0.6.9", _FLASHINFER),
    Rival(
        "flashinfer-python",
        "0.7.2.post1",
        {
            **_FLASHINFER,
            "flashinfer.cake_sampling:cake_sampling_route": ("probs", "top_k", "top_k_max"),
            "flashinfer.cake_sampling:top_k_top_p_sampling_from_probs": (
                *("probs", "top_k", "top_p", "top_k_max"),
            ),
        },
    ),
)


class Source:
    """The Python files of a package below `root`, read and not run."""

    def __init__(self, root: Path):
        self._root = root
        self.tree = cache(self._tree)

    def _tree(self, module: str) -> ast.Module | None:
        path = self._root / module.replace(".", "/")
        for each in (path.with_suffix(".py"), path / "__init__.py"):
            if each.is_file():
                return ast.parse(each.read_text(encoding="utf-8"))
        return None

    def _arguments(self, where: str) -> ast.arguments | None:
        module, _, path = where.partition(":")
        cls, _, name = path.rpartition(".")
        found = self._method(module, cls, name) if cls else self._named(module, name)
        return found.args if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) else None

    def required(self, where: str) -> list[str]:
        """The parameters of a function that have no default."""
        given = self._arguments(where)
        if given is None:
            return []
        placed = [*given.posonlyargs, *given.args]
        named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        return [
            *(each.arg for each in placed[: len(placed) - len(given.defaults)]),
            *(each.arg for each, default in named if default is None),
        ]

    def parameters(self, where: str) -> list[str] | None:
        """Of a function at module:name or module:class.name, in inspect's order."""
        given = self._arguments(where)
        if given is None:
            return None
        listed = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
        return [each.arg for each in listed if each is not None]

    def fields(self, where: str) -> dict[str, bool] | None:
        """Annotated names of a class's body -> whether they have a default."""
        module, _, name = where.partition(":")
        cls = self._named(module, name)
        if not isinstance(cls, ast.ClassDef):
            return None
        return {
            each.target.id: each.value is not None
            for each in cls.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }

    def attributes(self, where: str) -> set[str] | None:
        """What instances of a class have: methods, names of its body, and what is put into self."""
        module, _, name = where.partition(":")
        lines = self._lineage(module, name)
        if not lines:
            return None
        found = set()
        for cls in lines:
            for line in cls.body:
                if isinstance(line, ast.FunctionDef):
                    found.add(line.name)
                targets = getattr(line, "targets", [getattr(line, "target", None)])
                found.update(each.id for each in targets if isinstance(each, ast.Name))
            for node in ast.walk(cls):
                if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
                    continue
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    found.add(node.attr)
        return found

    def _named(self, module: str, name: str) -> ast.AST | None:
        """A class or function of a module, or of the module that it is imported from."""
        tree = self.tree(module)
        for node in tree.body if tree else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return node
            if not (isinstance(node, ast.ImportFrom) and node.module):
                continue
            if name in [each.asname or each.name for each in node.names]:
                return self._named(node.module, name)
        return None

    def _lineage(self, module: str, name: str) -> list[ast.ClassDef]:
        """A class and those that it inherits from, as far as they are of the package."""
        cls = self._named(module, name)
        if not isinstance(cls, ast.ClassDef):
            return []
        bases = [each.id for each in cls.bases if isinstance(each, ast.Name)]
        return [cls, *(line for base in bases for line in self._lineage(module, base))]

    def _method(self, module: str, cls: str, name: str) -> ast.AST | None:
        for line in self._lineage(module, cls):
            for node in line.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                    return node
        return None


def check(expected: ExpectedApi, root: Path) -> list[str]:
    """A line for each thing that differs between what is expected and the source below root."""
    source = Source(root)
    lines = differences(expected, source.parameters, source.fields)
    for where, names in expected.attributes.items():
        found = source.attributes(where)
        absent = [name for name in names if name not in (found or ())]
        if absent:
            lines.append(f"{where}: expected attributes {', '.join(absent)}")
    return lines


def check_rival(rival: Rival, root: Path) -> list[str]:
    """A line for each thing that differs between a rival's calls and the source below root."""
    source, lines = Source(root), []
    for where, given in rival.calls.items():
        known = source.parameters(where)
        if known is None:
            lines.append(f"{where}: not found")
            continue
        known = [name for name in known if name != "self"]
        needed = source.required(where)
        if unknown := [name for name in given if name not in known]:
            lines.append(f"{where}: expected parameters {', '.join(unknown)}; got {known}")
        if absent := [name for name in needed if name not in (*given, "self")]:
            lines.append(f"{where}: needs {', '.join(absent)}, which are not given")
    for where, attributes in rival.attributes.items():
        there = source.attributes(where) or set()
        if absent := [name for name in attributes if name not in there]:
            lines.append(f"{where}: expected attributes {', '.join(absent)}")
    return lines


def download(package: str, version: str) -> Path:
    """The Python files of a version, from the package index if they are not here."""
    folder = FOLDER / f"{package}-{version}"
    if folder.is_dir():
        return folder
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (28, 31, 34, 35)]
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", temporary),
                *("--only-binary", ":all:", "--python-version", "3.12"),
                *(word for each in platforms for word in ("--platform", each)),
                f"{package}=={version}",
            ],
            check=True,
        )
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name
                for name in archive.namelist()
                if name.startswith(KEPT[package]) and name.endswith(".py")
            ]
            archive.extractall(folder, names)
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", action="append", default=[], metavar="PACKAGE-VERSION=FOLDER")
    given = dict(each.split("=", 1) for each in parser.parse_args(arguments).source)
    checks = [("vllm", EXPECTED.version, partial(check, EXPECTED))]
    checks += [(each.package, each.version, partial(check_rival, each)) for each in RIVALS]
    failed = 0
    for package, version, differ in checks:
        root = Path(given.get(f"{package}-{version}") or download(package, version))
        lines = differ(root)
        failed += len(lines)
        print(f"{package} {version}: {len(lines) or 'no'} differences in {root}")
        for line in lines:
            print(f"  {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
