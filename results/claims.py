"""The claim ledger: every checkable statement of the paper as data, and the verdict it has here.

``claims.yaml`` holds the claims; this module validates it. A verdict needs a record behind it, so a
row made from the data alone is "not measured".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from results.errors import ClaimError

CLAIM_IDS = tuple(f"C{number:02d}" for number in range(1, 38))

Kind = Literal["ratio", "order", "bytes", "bound", "points"]
Scope = Literal["cpu", "calc", "gpu"]
Verdict = Literal["agrees", "agrees in direction", "disagrees", "not measured"]
Unit = Literal["x", "GB", "GiB", "rank", "points", "fraction", "benchmarks"]
Fraction = Annotated[float, Field(ge=0, le=1)]


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PaperValue(_Data):
    """One number the paper's prose gives."""

    quantity: str
    relation: Literal["equal", "about", "below", "above", "at_most", "at_least", "between"]
    value: float | None = None
    low: float | None = None
    high: float | None = None
    unit: Unit

    @model_validator(mode="after")
    def _bounds_or_value(self) -> Self:
        between = self.relation == "between"
        if between != (self.value is None) or between == (self.low is None or self.high is None):
            raise ValueError("'between' takes low and high, every other relation takes value")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"{self.low} is not below {self.high}")
        return self


class Rule(_Data):
    """How a kind of claim is judged."""

    agrees: str
    agrees_in_direction: str | None = None
    """None where a claim of this kind holds or does not."""
    tolerance: Fraction | None = None
    """Relative distance from the paper's value that still agrees."""


class Claim(_Data):
    """One statement of the paper."""

    id: str
    section: tuple[str, ...]
    statement: str
    kind: Kind
    paper_values: tuple[PaperValue, ...] = ()
    """Numbers in the prose; an order, or a statement without one, has none."""
    setting: str
    """The paper's setting."""
    here: tuple[Scope, ...]
    """Where it can be checked: small models on a CPU, formulas or a queue model, a GPU."""
    here_note: str | None = None
    measure: str
    """What is compared with what."""
    command: str | None = None
    """Command that measures it; None with a reason while there is none."""
    no_command: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.command is None) == (self.no_command is None):
            raise ValueError("give either command or no_command, the reason why there is none")
        if not self.here or len(set(self.here)) < len(self.here):
            raise ValueError("here lists each scope once and at least one")
        if self.kind in ("ratio", "points") and not self.paper_values:
            raise ValueError(f"a claim of kind {self.kind} needs the paper's value")
        return self


class Workload(_Data):
    """One benchmark as the paper runs it."""

    model: str
    tau: Fraction
    rho: Fraction
    frames: PositiveInt | None = None
    frame_pixels: PositiveInt | None = None
    """Width and height of a frame."""
    tokens_per_frame: PositiveInt | None = None


class Traces(_Data):
    """The controlled serving traces, in tokens unless the name says otherwise."""

    model: str
    agents: PositiveInt
    hops_per_second: tuple[float, ...]
    """0 stands for single stream."""
    shared_tokens: tuple[PositiveInt, ...]
    output_tokens: tuple[PositiveInt, ...]
    system_tokens: PositiveInt
    private_tokens: PositiveInt
    glue_tokens: PositiveInt
    tail_tokens: PositiveInt
    requests: PositiveInt
    repeats: PositiveInt


class PaperSettings(_Data):
    """Settings of the paper's runs."""

    rank_base: PositiveInt
    rank_delta: PositiveInt
    pool_capacity: PositiveInt
    pool_capacity_kvcomm: PositiveInt
    selective_rho: tuple[Fraction, ...]
    delta_rho: tuple[Fraction, ...]
    task_agents: PositiveInt
    """Agents before FinalRefer."""
    runs: PositiveInt
    workloads: dict[str, Workload]
    traces: Traces


class Ledger(_Data):
    """The whole of ``claims.yaml``."""

    paper: PaperSettings
    rules: dict[Kind, Rule]
    claims: tuple[Claim, ...]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        ids = [claim.id for claim in self.claims]
        if repeated := sorted({id_ for id_ in ids if ids.count(id_) > 1}):
            raise ValueError(f"claims given twice: {', '.join(repeated)}")
        if missing := sorted(set(CLAIM_IDS) ^ set(ids)):
            raise ValueError(f"claims missing or unknown: {', '.join(missing)}")
        if unruled := sorted({claim.kind for claim in self.claims} - set(self.rules)):
            raise ValueError(f"kinds without a rule: {', '.join(unruled)}")
        return self


@dataclass(frozen=True)
class Measured:
    """One number behind a verdict, with its interval and what it could be at most."""

    quantity: str
    value: float
    low: float = math.nan
    high: float = math.nan
    bound: float | None = None

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" [{_short(self.low)}, {_short(self.high)}]"
        bound = "" if self.bound is None else f", work bound {self.bound:.2f}"
        return f"{self.quantity}: {_short(self.value)}{interval}{bound}"


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


@dataclass(frozen=True)
class LedgerRow:
    """A claim with its verdict, the keys of the records behind it, the numbers, their setting."""

    claim: Claim
    verdict: Verdict = "not measured"
    runs: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()
    setting: str = ""

    def __post_init__(self) -> None:
        """Refuse a verdict without a record, and records without a verdict."""
        if (self.verdict == "not measured") != (not self.runs):
            raise ClaimError(
                f"{self.claim.id}: verdict {self.verdict!r} with {len(self.runs)} runs behind it"
            )

    @property
    def texts(self) -> tuple[str, ...]:
        """The numbers and, last, their setting, as a person reads them."""
        return (*map(str, self.measured), *([self.setting] if self.setting else ()))


def parse_ledger(text: str) -> Ledger:
    """Parse and validate the ledger's YAML. Raises ClaimError naming the place and the fault."""
    try:
        content: Any = yaml.safe_load(text)
        return Ledger.model_validate(content)
    except yaml.YAMLError as error:
        raise ClaimError(f"claims.yaml is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ClaimError(f"claims.yaml: {place}: {first['msg']}") from error


def load_ledger() -> Ledger:
    """Load the packaged ledger: paper settings, rules and claims."""
    return parse_ledger(files("results").joinpath("claims.yaml").read_text(encoding="utf-8"))


def load_claims() -> tuple[Claim, ...]:
    """All claims, C01 to C37, in order."""
    return tuple(sorted(load_ledger().claims, key=lambda claim: claim.id))
