"""Completing what vLLM leaves of a turn, after its first token, for what later turns read.

vLLM's pages hold K and V of every row it executed. Three things may be missing: rows of the output
(the last sampled token is never fed back; a replayed output is not generated at all), residual rows
before some layer, and the attention that tokens received. Then the rows from where something is
missing go through the model once more, on a copy that has room for them.
"""

from __future__ import annotations

import torch

from kvcmas.engine.cache import Buffer, ContiguousBuffer
from kvcmas.engine.session import OpenTurn, Session


def complete_prompt(
    session: Session, opened: OpenTurn, left: Buffer, output: tuple[int, ...]
) -> Buffer:
    """``left`` itself if nothing is missing, else a copy that is complete up to the prompt's end.

    Args:
        left: buffer over the pages; its ``length`` says how many rows of prompt and output it has.
        output: ids of the output without its stop token.
    """
    executor, wants = session.engine.executor, session.engine.method.wants
    prompt = opened.turn.prompt
    if not (wants.sources and session.reads_later(opened.node, prompt)):
        return left
    rows, again = len(prompt), left.length
    if wants.received is not None:
        again = min(again, rows)
    collects = wants.hidden_layers or wants.received == "all"
    if collects:
        # The plug-in executed all rows but the last.
        again = rows - 1
    if again >= rows + len(output):
        return left
    copy = executor.new_buffer(rows, len(output))
    copy.origin, copy.length = left.origin, again
    k, v = left.gather(range(again))
    copy.k[:, :, :again], copy.v[:, :, :again] = k, v
    for layer, hidden in left.hidden.items():
        copy.hidden[layer] = hidden.new_full((copy.capacity, hidden.shape[1]), torch.nan)
        copy.hidden[layer][:again] = hidden[:again]
    if left.received is not None:
        executor.collect_received(copy, prompt, opened.plan)
        assert copy.received is not None
        copy.received.total[:rows] = left.received.total[:rows]
    if again < rows:
        executor.extend(copy, prompt.ids[again:])
    return copy


def complete_output(
    session: Session, opened: OpenTurn, buffer: Buffer, output: tuple[int, ...]
) -> None:
    """Give the rows of ``output`` that ``buffer`` does not have yet their K and V."""
    if not isinstance(buffer, ContiguousBuffer):
        return
    engine, prompt = session.engine, opened.turn.prompt
    if engine.method.wants.received == "decode":
        engine.executor.collect_received(buffer, prompt, opened.plan)
    if missing := output[buffer.length - len(prompt) :]:
        engine.executor.extend(buffer, missing)
