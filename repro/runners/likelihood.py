"""Log-likelihoods of possible replies at the end of a turn's prompt, on the turn's own buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvcmas.engine.executor import Executor
from kvcmas.engine.session import TurnResult


class Likelihood(NamedTuple):
    """Natural logarithm of a reply's probability, and whether greedy decoding would produce it."""

    nats: float
    greedy: bool


def likelihoods(
    executor: Executor, result: TurnResult, replies: Sequence[tuple[int, ...]]
) -> tuple[Likelihood, ...]:
    """Likelihood of each reply (token ids) after the prompt of ``result``.

    The first token is judged by the turn's first logits. Longer replies are fed to the turn's
    buffer behind the prompt, over what was generated there: the buffer is of no other use
    afterwards. It must have been kept and have room for the longest reply but its last token.

    Raises:
        ValueError: an empty reply, or no buffer where one is needed.
    """
    return tuple(_likelihood(executor, result, reply) for reply in replies)


def _likelihood(executor: Executor, result: TurnResult, reply: tuple[int, ...]) -> Likelihood:
    if not reply:
        raise ValueError("an empty reply has no likelihood")
    rows = [result.first_logits]
    if len(reply) > 1:
        if result.buffer is None:
            raise ValueError("replies of several tokens need the turn's buffer")
        result.buffer.length = len(result.prompt)
        rows += executor.extend(result.buffer, reply[:-1]).unbind(0)
    parts = [_token(row, token) for row, token in zip(rows, reply, strict=True)]
    return Likelihood(sum(nats for nats, _ in parts), all(greedy for _, greedy in parts))


def _token(logits: Tensor, token: int) -> tuple[float, bool]:
    """``logits [vocab]``; fp64, so that a sum over tokens does not depend on their number."""
    return float(logits.double().log_softmax(-1)[token]), int(logits.argmax()) == token
