"""`DraftVocabulary`: the tokens of the target in a reduced draft head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsbench import reference
from fsbench.errors import InvalidArgument
from fsbench.kernels.checks.tensors import check_bias, check_dense, check_mask, check_tensor
from fsbench.kernels.checks.values import check_integer


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """Tokens of the target in a draft head; made by prepare_draft_vocabulary.

    The host waits for the device to check the values.

    Args:
        token_ids: int64 [V_draft], the target's token of each row of the draft head.
        vocab_size: V, the number of the target's tokens.

    Raises:
        InvalidType, InvalidArgument: Another tensor, a token outside [0, V), or a token in two
            rows.
    """

    token_ids: Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        V, ids = check_integer("vocab_size", self.vocab_size, 1, 2**31 - 1), self.token_ids
        rows = check_dense("token_ids", ids).numel()
        if not 0 < rows <= V:
            raise InvalidArgument(f"token_ids: expected 1 to {V} of them; got {rows}")
        check_tensor("token_ids", ids, [torch.int64], [(rows,)], ids.device)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= V:
            raise InvalidArgument(
                f"token_ids: expected tokens 0 to {V - 1}; got {low if low < 0 else high}"
            )
        times = torch.bincount(ids, minlength=V)
        if int(times.max()) > 1:
            raise InvalidArgument(
                "token_ids: expected a different token in each row; "
                f"got token {int(times.argmax())} in {int(times.max())} rows"
            )

    def bias(self, bias: Tensor | None, B: int) -> Tensor | None:
        """Return the columns of a bias [V] or [B, V] that the draft head has."""
        if bias is None:
            return None
        check_bias(bias, B, self.vocab_size, self.token_ids.device)
        return bias[..., self.token_ids].contiguous()

    def mask(self, mask: Tensor | None, B: int) -> Tensor | None:
        """Return those of a mask, bool [B, V] or packed, as bool [B, V_draft]."""
        if mask is None:
            return None
        ids = self.token_ids
        check_mask(mask, B, self.vocab_size, ids.device)
        if mask.dtype == torch.bool:
            return mask[:, ids].contiguous()
        return ((mask[:, ids >> 5] >> (ids & 31)) & 1).bool()

    def spread(self, logits: Tensor, columns: int) -> Tensor:
        """Return [B, columns >= V]: the logits [B, V_draft] at their tokens, -inf elsewhere."""
        dense = logits.new_full((len(logits), columns), -torch.inf)
        return dense.index_copy_(1, self.token_ids, logits)


def prepare_draft_vocabulary(token_ids: Tensor, vocab_size: int) -> DraftVocabulary:
    """Check the map from the rows of a draft head to the target's tokens; call it once, at loading.

    The host waits for the device to check the values.

    Args:
        token_ids: int32 or int64 [V_draft], contiguous: the target's token of each row, in any
            order. (EAGLE-3 stores d2t, the difference: token_ids = d2t + arange(V_draft).)
        vocab_size: V of the target.

    Raises:
        InvalidType, InvalidArgument: As DraftVocabulary.
    """
    ids = check_dense("token_ids", token_ids)
    return DraftVocabulary(ids.long() if ids.dtype == torch.int32 else ids, vocab_size)


def noise_by_reference(
    ids: Tensor, V: int, seed: Tensor, step: Tensor, temperature: float | Tensor, B: int
) -> Tensor:
    """Return T times the Gumbel of each token of ids [N], by fsbench.reference: fp32 [B, N]."""
    rows = torch.arange(B, device=ids.device) * (seed.numel() == 1)
    T = reference.as_column(temperature, ids.device)
    T = torch.where((T >= 0) & (torch.inf > T), T, torch.nan)
    T = torch.where(T < reference.logits.SMALLEST_TEMPERATURE, 0.0, T)
    return (T * reference.token_noise(V, seed, step, rows)[:, ids]).float()
