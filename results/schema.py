"""The rows of a run: what ``run.json`` and ``records.jsonl`` hold, field by field.

Units are in the names (``_s`` seconds, ``_bytes``, ``_tokens``); an *entry* is one (layer, prompt
row) cell of the K,V buffer. Unknown fields and non-finite numbers are refused, so that what was
written is what is read.
"""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from results.stream_schema import StreamInfo

SCHEMA_VERSION: Final = 1

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RunKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Action = Literal["dense", "reuse", "correct", "recompute"]
DataLabel = Literal["hub", "local", "package", "procedural"]
Share = Annotated[float, Field(ge=0, le=1)]

# Kinds of run that hold TTFT under load, and how it came about: no table has two of them.
SERVED_MODES: Final = MappingProxyType(
    {"serve": "real", "emulate": "emulated", "model": "modelled"}
)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ServeInfo(_Record):
    """The cell of a serving run: one method under one load. QPS is agent requests per second."""

    mode: Literal["real", "emulated", "modelled"] = "real"
    """Methods splice, execute and correct real caches; the public harness's cost model on a real
    engine; a queue model, nothing was run."""
    emulation: dict[str, JsonValue] = Field(default_factory=dict)
    """Emulated cells only: what the method is charged."""
    layout: str
    """Of the trace: "T" or "L0" (generated), "recorded"."""
    shared_tokens: PositiveInt
    output_tokens: PositiveInt
    """Tokens of the shared span and of each output, before ``scale`` divides them."""
    agents: PositiveInt
    scale: PositiveFloat
    arrival: Literal["even", "poisson", "workflow", "azure"]
    qps: NonNegativeFloat
    """As asked for; 0 is a single stream."""
    time_scale: PositiveFloat
    """Seconds here that stand for one second of the paper's machine; 1 is the raw rate."""
    capacity: PositiveFloat
    """Requests per second that NonShared serves here, one after another."""
    clock: Literal["virtual", "wall"]
    decode: bool
    """Outputs were decoded; else requests end with their first token, as in the paper."""
    slo_ttft_s: PositiveFloat | None = None
    slo_inter_token_s: PositiveFloat | None = None
    rho: Share
    """Reuse ratio of the delta methods in this comparison."""
    rho_kind: Literal["none", "all", "controlled", "budget", "gate"]
    """Nothing is reused; everything; a schedule of dense transitions; a share recomputed; gates."""
    rho_method: Share | None
    """What this method was set to, for instance 0.9 where selective methods face 0.8."""
    schedule: dict[str, JsonValue]
    work_bound: PositiveFloat | None
    """Speed-up over NonShared if prompt tokens were all that costs; None under gates."""
    pool: str
    """Name of the warm pool the cell started from; "fresh" for an empty one."""
    pool_entries: NonNegativeInt
    warm_up_requests: NonNegativeInt
    """Discarded requests before the first cell of this shape."""
    memory_needed_bytes: NonNegativeInt
    """Estimated: weights, live caches and full pools."""
    memory_limit_bytes: PositiveInt
    out_of_memory: bool = False
    """The estimate is above the limit, so nothing was run."""

    @property
    def qps_here(self) -> float:
        """Requests per second on this machine's clock."""
        return self.qps / self.time_scale


class RunInfo(_Record):
    """``run.json``: everything that must be known to repeat the run or to compare it (rule 7)."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run_key: RunKey
    created: AwareDatetime
    kind: str
    """What was run: "accuracy", "fidelity", "serve", ..."""
    bench: str
    data: DataLabel
    data_sha256: Sha256
    method: str
    label: str = ""
    """Variant shown beside the method's name when its settings are not the defaults ("r=8")."""
    settings: dict[str, JsonValue]
    model: str
    model_revision: str | None
    dtype: str
    engine: str
    """What executed the rows: "transformers" or "vllm"."""
    attention: str
    """Attention backend, for instance "sdpa"."""
    device: str
    hardware: str
    """Processor or accelerator, as the vendor names it."""
    seed: int
    sample_order_sha256: Sha256
    pool_state: Literal["cold", "warm"] = "cold"
    """Whether the anchor pools were empty when the first evaluated sample began."""
    n: PositiveInt
    """Samples planned, warm-up included; the rows tell how many are complete."""
    max_new_tokens: PositiveInt
    final_tokens: PositiveInt | None = None
    """Limit of the last agent's turn, where it is another one."""
    workflow: str
    agents: tuple[str, ...] = ()
    """Display names, in the order of the agents' numbers."""
    workload: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the benchmark's workload that are not its defaults."""
    target_rho: Share | None = None
    """Reuse ratio that the settings were calibrated for."""
    profile: str
    image_processor: str | None = None
    """What turned images and frames into the vision tower's input; None where there were none."""
    missing: tuple[str, ...] = ()
    """Samples left out because their image or clip was not there."""
    environment: dict[str, JsonValue]
    """The environment record; its key "git_commit" goes into table footers."""
    command: str
    serve: ServeInfo | None = None
    """Runs of the kinds in ``SERVED_MODES`` only."""
    stream: StreamInfo | None = None
    """Runs of kind "stream" only."""

    @model_validator(mode="after")
    def _serving_has_its_cell(self) -> Self:
        mode = None if self.serve is None else self.serve.mode
        if mode != SERVED_MODES.get(self.kind):
            kinds = ", ".join(f"{kind} ({mode})" for kind, mode in SERVED_MODES.items())
            raise ValueError(f"a run of kind {kinds}, and no other, says what it served")
        return self

    @model_validator(mode="after")
    def _streams_have_their_cell(self) -> Self:
        if (self.kind == "stream") != (self.stream is not None):
            raise ValueError("a run of kind stream, and no other, says what it ran")
        return self

    @property
    def workload_label(self) -> str:
        """The workload's settings as text: runs that differ in them measured different things."""
        return " ".join(f"{key}={self.workload[key]}" for key in sorted(self.workload))

    @property
    def git_commit(self) -> str | None:
        """Commit of the code that ran, if the environment record names one."""
        commit = self.environment.get("git_commit")
        return commit if isinstance(commit, str) else None


class EntryCounts(_Record):
    """Where the prompt's (layer, row) entries came from; together they are all of them (rule 8)."""

    reused: NonNegativeInt
    corrected: NonNegativeInt
    executed: NonNegativeInt
    prefix_hit: NonNegativeInt

    @property
    def total(self) -> int:
        """Sum of the four counts, in entries."""
        return self.reused + self.corrected + self.executed + self.prefix_hit


class EdgeRecord(_Record):
    """One shared segment as one turn consumed it."""

    slot: str
    source: str | None
    """Node whose cache was the source; None if nobody held the segment yet."""
    target: str
    tokens: NonNegativeInt
    action: Action
    reason: str
    """Why the method accepted or refused, in its own words."""
    entropy: float | None = None
    """Normalised gate entropy, 0 to 1; None where no gate was asked."""
    shared_entries: NonNegativeInt
    """layers x tokens."""
    executed_entries: NonNegativeInt
    """Those of them that model execution rebuilt."""
    first: bool
    """Nobody held the segment yet, so there was nothing to reuse."""

    @model_validator(mode="after")
    def _executed_within_shared(self) -> Self:
        if self.executed_entries > self.shared_entries:
            raise ValueError(
                f"{self.executed_entries} executed entries of {self.shared_entries} shared ones"
            )
        return self


class FirstToken(_Record):
    """First-token distribution against NonShared on the very same prompt; else both are None."""

    kl: float | None = None
    """KL(NonShared || method) in nats."""
    agree: bool | None = None
    """Same most likely token."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.kl is None) != (self.agree is None):
            raise ValueError("kl and agree are measured together")
        return self


class FidelityEdge(EdgeRecord):
    """An edge with what the method left in it, measured against the exact cache of the segment.

    Errors are ``||C_hat - C||_F / ||C||_F`` of this segment's rows, one per layer, without a unit;
    both are empty for an empty segment.
    """

    k_error: tuple[NonNegativeFloat, ...]
    v_error: tuple[NonNegativeFloat, ...]

    @model_validator(mode="after")
    def _errors_fit_the_segment(self) -> Self:
        if len(self.k_error) != len(self.v_error):
            raise ValueError(
                f"edge {self.slot}: K errors of {len(self.k_error)} layers, "
                f"V errors of {len(self.v_error)}"
            )
        if self.k_error and not self.tokens:
            raise ValueError(f"edge {self.slot}: an empty segment has no error")
        return self


class ExecutedTurn(_Record):
    """What every executed turn has: its identity, and where each entry of its prompt came from."""

    kind: str
    run_key: RunKey
    sample_id: str
    sample_index: NonNegativeInt
    node: str
    turn_index: NonNegativeInt
    prompt_sha256: Sha256
    prompt_tokens: PositiveInt
    ttft_s: PositiveFloat | None
    """Intended arrival to first token; None, never 0, if no token came."""
    e2e_s: NonNegativeFloat
    times_s: dict[str, NonNegativeFloat]
    """Parts of e2e_s: plan, prefill, build, decode, capture, observe."""
    layers: PositiveInt
    entries: EntryCounts
    touched_rows: NonNegativeInt
    executed_flops: NonNegativeInt
    reference_tokens: NonNegativeInt
    """Tokens prefilled only to have a context-free reference."""
    edges: tuple[EdgeRecord, ...]
    source_bytes: NonNegativeInt
    pool_bytes: NonNegativeInt
    pool_entries: NonNegativeInt
    reference_bytes: NonNegativeInt

    @model_validator(mode="after")
    def _entries_add_up(self) -> Self:
        expected = self.layers * self.prompt_tokens
        if self.entries.total != expected:
            raise ValueError(
                f"entries add up to {self.entries.total}, layers x prompt_tokens is {expected}"
            )
        for edge in self.edges:
            if edge.shared_entries != self.layers * edge.tokens:
                raise ValueError(
                    f"edge {edge.slot}: {edge.shared_entries} shared entries, "
                    f"layers x tokens is {self.layers * edge.tokens}"
                )
        if sum(edge.tokens for edge in self.edges) > self.prompt_tokens:
            raise ValueError("the shared segments are longer than the prompt")
        executed = sum(edge.executed_entries for edge in self.edges)
        if executed > self.entries.executed:
            raise ValueError(
                f"edges executed {executed} entries, the whole prompt {self.entries.executed}"
            )
        return self


class TurnRecord(ExecutedTurn):
    """One agent turn as it was served."""

    kind: Literal["turn"] = "turn"
    output_tokens: NonNegativeInt
    """Tokens sampled, the stop token included."""
    output_ids_sha256: Sha256
    finish: Literal["stop", "length"]
    first_token: FirstToken = FirstToken()
    peak_memory_bytes: NonNegativeInt | None

    @model_validator(mode="after")
    def _token_and_time_come_together(self) -> Self:
        if (self.ttft_s is None) != (self.output_tokens == 0):
            raise ValueError(
                f"ttft_s is {self.ttft_s} with {self.output_tokens} output tokens: "
                "it is None exactly when no token was sampled (the stop token counts)"
            )
        return self


class FidelityRecord(ExecutedTurn):
    """One turn of a recorded NonShared trajectory, replayed on its very ids (teacher-forced)."""

    kind: Literal["fidelity"] = "fidelity"
    last: bool
    """The last turn of its workflow."""
    warm: bool
    """Only there to fill the pools before the evaluation; nothing of it is evaluated."""
    row_layers: NonNegativeInt
    """Prompt rows times the layers that executed them, written to the buffer or not."""
    edges: tuple[FidelityEdge, ...]
    answer_kl: tuple[NonNegativeFloat, ...]
    """KL(NonShared || method) in nats at each of the first T answer tokens; [0] is the first."""
    answer_agree: tuple[bool, ...]
    """Same most likely token there."""

    @model_validator(mode="after")
    def _errors_cover_the_layers(self) -> Self:
        for edge in self.edges:
            measured, expected = len(edge.k_error), self.layers if edge.tokens else 0
            if measured != expected and not (self.warm and measured == 0):
                raise ValueError(
                    f"edge {edge.slot}: errors of {measured} layers where {expected} were expected"
                )
        return self

    @model_validator(mode="after")
    def _answer_and_time_come_together(self) -> Self:
        if len(self.answer_kl) != len(self.answer_agree):
            raise ValueError(
                f"KL at {len(self.answer_kl)} tokens, agreement at {len(self.answer_agree)}"
            )
        came, compared = self.ttft_s is not None, bool(self.answer_kl)
        if came != compared and not (self.warm and came):
            raise ValueError(
                f"ttft_s is {self.ttft_s} with {len(self.answer_kl)} answer tokens compared: "
                "a turn has both or neither, a warm-up turn may have the time alone"
            )
        return self

    @model_validator(mode="after")
    def _executed_entries_were_executed(self) -> Self:
        if self.row_layers < self.entries.executed:
            raise ValueError(
                f"{self.row_layers} row-layers cannot have executed {self.entries.executed} entries"
            )
        return self


class RequestRecord(ExecutedTurn):
    """One agent request under load. Times are seconds on the cell's clock, which starts at 0."""

    kind: Literal["request"] = "request"
    ttft_s: PositiveFloat
    arrival_s: NonNegativeFloat
    """Intended arrival; the request may have been handed to the engine later."""
    released_s: NonNegativeFloat
    """When the last source it reads was there; the arrival if none was missing."""
    started_s: NonNegativeFloat
    finished_s: NonNegativeFloat
    inter_token_s: tuple[NonNegativeFloat, ...] = ()
    """Decoding only: gaps between the tokens of the output."""
    fallback: str | None = None
    """Why the engine served it densely against the method's plan."""

    @property
    def queue_s(self) -> float:
        """Intended arrival to start of execution."""
        return self.started_s - self.arrival_s

    @model_validator(mode="after")
    def _times_in_order(self) -> Self:
        times = (
            self.arrival_s,
            self.released_s,
            self.started_s,
            self.arrival_s + self.ttft_s,
            self.finished_s,
        )
        # Packed times are rounded one by one, to seven digits.
        slack = 2e-6 * max(1.0, times[-1])
        if any(later < earlier - slack for earlier, later in pairwise(times)):
            raise ValueError(f"arrival, release, start, first token, end are out of order: {times}")
        return self


class LostRequest(_Record):
    """A request without an answer. It counts, and no percentile hides it."""

    kind: Literal["lost"] = "lost"
    run_key: RunKey
    sample_id: str
    sample_index: NonNegativeInt
    node: str
    turn_index: NonNegativeInt
    prompt_sha256: Sha256
    arrival_s: NonNegativeFloat | None
    """None if it was waiting for a turn that never ended."""
    state: Literal["failed", "unfinished"]
    reason: str


class SampleRecord(_Record):
    """One benchmark question or served workflow, written after the last of its turns."""

    kind: Literal["sample"] = "sample"
    run_key: RunKey
    sample_id: str
    sample_index: NonNegativeInt
    correct: bool | None
    """None if the answer was not scored."""
    extracted: str | None
    expected: str
    failure: str | None
    """Why no answer could be extracted, for instance "no number in the answer"."""
    outputs: dict[str, str]
    """Output text per node."""
    e2e_s: NonNegativeFloat
    ttft_mean_s: PositiveFloat | None
    notes: dict[str, JsonValue] = Field(default_factory=dict)
    """Anything else worth keeping; must be the same in every repetition, so no timings."""
