"""What the worker says about a turn when it is over. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcmas.engine.accounting import Accounting
from kvcmas.engine.contract import Decision


@dataclass(frozen=True)
class Seconds:
    """Where the plug-in's time went in one turn (host time; on a GPU after all queued work).

    ``plan``, ``execute`` and, once it was preempted, ``again`` lie before the first token and so in
    TTFT; ``inject`` is the part of ``execute`` that filled rows from caches. ``background`` is a
    reference prefill that the method wants off the path. ``build`` (anchors), ``extend`` (K and V
    of output tokens that nobody has executed) and ``capture`` come after the first token.
    """

    plan: float = 0.0
    execute: float = 0.0
    inject: float = 0.0
    again: float = 0.0
    background: float = 0.0
    build: float = 0.0
    extend: float = 0.0
    capture: float = 0.0


@dataclass(frozen=True)
class TurnReport:
    """One finished turn.

    Attributes:
        key: vLLM's id of the request.
        external_rows: rows that the plug-in wrote; vLLM executed the others.
        fell_back: why the turn ran densely although the method did not say so; None if it did not.
        first_seen, holders: see :class:`~kvcmas.engine.session.TurnResult`.
        loads: times the plan was carried out; more than one after preemption.
        source_bytes, reference_bytes: of the workflow after the turn.
    """

    key: str
    tenant: str
    request: str
    node: str
    prompt_sha256: str
    output_tokens: int
    external_rows: int
    decisions: tuple[Decision, ...]
    accounting: Accounting
    fell_back: str | None
    first_seen: frozenset[int]
    holders: Mapping[int, str]
    loads: int
    seconds: Seconds
    source_bytes: int
    reference_bytes: int
