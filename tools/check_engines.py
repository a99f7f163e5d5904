"""Compare the calls that fsbench makes to other packages with their source (`make check-engines`).

    python tools/check_engines.py [--source vllm-0.26.0=FOLDER ...]

Downloads each wheel (up to 300 MB) from the package index, keeps its Python files in build/engines,
and reads signatures, fields and attributes without importing the package. They must be those that
fsbench.integrations.vllm_0_26 expects, and accept the calls of baselines (RIVALS). Prints a line
for each difference; exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
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
    "flashinfer.sampling:min_p_sampling_from_probs": ("probs", "min_p", "seed", "offset"),
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

    Attributes:
        calls: function -> the arguments that are passed; all those without a default must be among
            them.
        attributes: as in ExpectedApi.
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
    """The Python files of a package below `root`, parsed and not run."""

    def __init__(self, root: Path):
        self._root = root
        self.tree = cache(self._tree)

    def _tree(self, module: str) -> ast.Module | None:
        path = self._root / module.replace(".", "/")
        for each in (path.with_suffix(".py"), path / "__init__.py"):
            if each.is_file():
                return ast.parse(each.read_text(encoding="utf-8"))
        return None

    def _arguments(self, path: str) -> ast.arguments | None:
        module, _, names = path.partition(":")
        cls, _, name = names.rpartition(".")
        node = self._method(module, cls, name) if cls else self._named(module, name)
        return node.args if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None

    def required(self, path: str) -> list[str]:
        """Return the parameters of a function that have no default."""
        arguments = self._arguments(path)
        if arguments is None:
            return []
        positional = [*arguments.posonlyargs, *arguments.args]
        keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return [
            *(each.arg for each in positional[: len(positional) - len(arguments.defaults)]),
            *(each.arg for each, default in keyword if default is None),
        ]

    def parameters(self, path: str) -> list[str] | None:
        """Return the parameters of module:name or module:class.name, in inspect's order."""
        arguments = self._arguments(path)
        if arguments is None:
            return None
        positional = [*arguments.posonlyargs, *arguments.args, arguments.vararg]
        listed = [*positional, *arguments.kwonlyargs, arguments.kwarg]
        return [each.arg for each in listed if each is not None]

    def fields(self, path: str) -> dict[str, bool] | None:
        """Return {annotated name of a class's body: whether it has a default}."""
        module, _, name = path.partition(":")
        cls = self._named(module, name)
        if not isinstance(cls, ast.ClassDef):
            return None
        return {
            each.target.id: each.value is not None
            for each in cls.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }

    def attributes(self, path: str) -> set[str]:
        """Return a class's methods, the names in its body, and the attributes stored in self."""
        module, _, name = path.partition(":")
        attributes = set()
        for cls in self._lineage(module, name):
            for line in cls.body:
                if isinstance(line, ast.FunctionDef):
                    attributes.add(line.name)
                targets = getattr(line, "targets", [getattr(line, "target", None)])
                attributes.update(each.id for each in targets if isinstance(each, ast.Name))
            for node in ast.walk(cls):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "self"
                ):
                    attributes.add(node.attr)
        return attributes

    def _named(self, module: str, name: str) -> ast.AST | None:
        """Return a class or function of a module, or of the module that it is imported from."""
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
        """Return a class and its bases, as far as they are in the package."""
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
    """Return a line for each difference between what is expected and the source below root."""
    source = Source(root)
    lines = differences(expected, source.parameters, source.fields)
    return lines + missing_attributes(source, expected.attributes)


def missing_attributes(source: Source, expected: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return a line for each class that lacks expected attributes."""
    lines = []
    for path, names in expected.items():
        attributes = source.attributes(path)
        if absent := [name for name in names if name not in attributes]:
            lines.append(f"{path}: expected attributes {', '.join(absent)}")
    return lines


def check_rival(rival: Rival, root: Path) -> list[str]:
    """Return a line for each difference between a rival's calls and the source below root."""
    source, lines = Source(root), []
    for path, arguments in rival.calls.items():
        parameters = source.parameters(path)
        if parameters is None:
            lines.append(f"{path}: not found")
            continue
        parameters = [name for name in parameters if name != "self"]
        if unknown := [name for name in arguments if name not in parameters]:
            lines.append(f"{path}: expected parameters {', '.join(unknown)}; got {parameters}")
        if absent := [name for name in source.required(path) if name not in (*arguments, "self")]:
            lines.append(f"{path}: requires {', '.join(absent)}, which are not passed")
    return lines + missing_attributes(source, rival.attributes)


def download(package: str, version: str) -> Path:
    """Return the folder of a version's Python files; download them if needed."""
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
    sources = dict(each.split("=", 1) for each in parser.parse_args(arguments).source)
    checks = [("vllm", EXPECTED.version, partial(check, EXPECTED))]
    checks += [(each.package, each.version, partial(check_rival, each)) for each in RIVALS]
    failed = 0
    for package, version, differ in checks:
        root = Path(sources.get(f"{package}-{version}") or download(package, version))
        lines = differ(root)
        failed += len(lines)
        print(f"{package} {version}: {len(lines) or 'no'} differences in {root}")
        for line in lines:
            print(f"  {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
