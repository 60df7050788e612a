"""What a hop costs on a named GPU: the executor's accounting and the bytes moved, on a roofline.

Rows are counted by the executor itself: each hop's plan, made by the method, runs once on a *ghost*
of the model, which has its layers and FLOPs but one hidden dimension and no attention. Layers that
select rows by what they compute select them at random there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat
from torch import Tensor

from baselines.fullshared import FullShared
from baselines.selective import Selective
from kvcmas.engine.accounting import Accounting
from kvcmas.engine.adapter import ModelSpec
from kvcmas.engine.attention import Rows
from kvcmas.engine.cache import ContiguousBuffer, SegmentCache
from kvcmas.engine.contract import Held, Method, Turn
from kvcmas.engine.executor import Executor
from kvcmas.engine.rope import Rope
from kvcmas.errors import UserError
from kvcmas.registry import suggestion
from repro.runners.queue_model import Service, reused_segments
from repro.runners.serving.budgets import context_free
from repro.runners.serving.capacity import prefill_flops
from repro.runners.serving.cells import Cell
from repro.runners.serving.engine import Request
from traces.schema import TurnKey


class Gpu(BaseModel):
    """Published peaks of a GPU; ``source`` says where they are from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    bf16_tflops: PositiveFloat
    bandwidth_gb_s: PositiveFloat
    memory_gb: PositiveFloat
    source: str


class Utilisation(BaseModel):
    """Share of the peaks that is taken to be reached."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compute: float = Field(gt=0, le=1)
    bandwidth: float = Field(gt=0, le=1)
    source: str


class Hardware(BaseModel):
    """The file ``repro/hardware.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    utilisation: Utilisation
    gpus: dict[str, Gpu]

    def gpu(self, name: str) -> Gpu:
        """The GPU called ``name``.

        Raises:
            UserError: there is none.
        """
        if name not in self.gpus:
            raise UserError(f"unknown GPU {name!r}{suggestion(name, tuple(self.gpus))}")
        return self.gpus[name]


def load_hardware() -> Hardware:
    """What is shipped with the package."""
    text = (resources.files("repro") / "hardware.yaml").read_text(encoding="utf-8")
    return Hardware.model_validate(yaml.safe_load(text))


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of one phase; phases follow one another."""

    flops: float
    nbytes: float

    def seconds(self, gpu: Gpu, used: Utilisation) -> float:
        """Time at the roofline: the slower of computing and moving."""
        compute = self.flops / (gpu.bf16_tflops * 1e12 * used.compute)
        return max(compute, self.nbytes / (gpu.bandwidth_gb_s * 1e9 * used.bandwidth))


class HopCosts:
    """Work of the requests of a cell on one model; counts each shape of a hop once."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._executor = _GhostExecutor(_Ghost(spec))
        self._counted: dict[object, Accounting] = {}

    @property
    def weight_bytes(self) -> int:
        """Layers and output head, each read once per prefill."""
        spec = self._spec
        attention = 2 * spec.hidden * spec.head_dim * (spec.heads + spec.kv_heads)
        layer = attention + 3 * spec.hidden * spec.ffn
        return (spec.layers * layer + spec.hidden * spec.vocab) * spec.dtype.itemsize

    def services(
        self, cell: Cell, method: Method, requests: Sequence[Request], gpu: Gpu, used: Utilisation
    ) -> dict[TurnKey, Service]:
        """Cost of every request on ``gpu``. Anchor building is not modelled: ``after_s`` is 0.

        Raises:
            UserError: a policy for agent-specific rows other than ``dense``, or gates.
        """
        if method.pf_policy != "dense":
            raise UserError(f"{cell.name}: repro model knows pf_policy=dense only")
        found: dict[TurnKey, Service] = {}
        referenced: set[tuple[str, str]] = set()
        segments = reused_segments(cell, method, requests)
        for request in requests:
            filled = segments[request.key]
            account = self.account(method, request, filled)
            lengths = [len(request.prompt.segments[i]) for i in filled]
            phases = [self.model(account), self.fills(method, lengths)]
            references = self._references(method, request, filled, referenced)
            phases += [self.reference(tokens) for tokens in references]
            found[request.key] = Service(
                first_token_s=sum(phase.seconds(gpu, used) for phase in phases),
                rows=account.row_layers / account.layers + sum(references),
            )
        return found

    def account(self, method: Method, request: Request, filled: tuple[int, ...]) -> Accounting:
        """What the executor executes of a request whose segments ``filled`` hold caches."""
        # Delta methods and FullShared fill the same rows; what differs is what is added to them.
        planner = method if isinstance(method, Selective) else FullShared()
        prompt = request.prompt
        lengths = tuple(len(segment) for segment in prompt.segments)
        key = (planner.name, repr(planner.settings()), lengths, filled)
        if key not in self._counted:
            hidden, layers = planner.wants.hidden_layers, self._spec.layers
            caches = {i: _ghost_cache(layers, lengths[i], hidden) for i in filled}
            name = request.turn.node.name
            turn = Turn(request.workflow.request, name, request.position, prompt)
            plan = planner.plan(turn, _Sources(caches))
            self._counted[key] = self._executor.run(prompt, plan).accounting
        return self._counted[key]

    def correction(self, method: Method, tokens: int) -> Work:
        """Matching and correcting one segment against a full pool: factors read once per use.

        Gate (values of the bases), weights (keys and values of the bases) and delta, for KVCMAS
        with the FLOPs of multiplying factors; nothing for methods without a pool.
        """
        spec, settings = self._spec, method.settings()
        row = spec.kv_bytes_per_token // spec.layers
        source = 1.5 * spec.layers * tokens * row
        if method.name == "graphflow":
            return Work(0, (spec.layers - 1) * tokens * row)
        if method.name not in ("kvcomm", "kvcmas"):
            return Work(0, 0)
        anchors = settings["capacity"] + (settings["capacity_rule"] == "authors")
        if method.name == "kvcomm":
            read = anchors * (1.5 * spec.layers + spec.layers - 1) * tokens * row
            return Work(0, source + read)
        width = spec.kv_heads * spec.head_dim
        flops, nbytes = 0.0, source
        for rank, layers in (
            (settings["rank_base"], 1.5 * spec.layers),
            (settings["rank_delta"], spec.layers - 1),
        ):
            used = min(rank or width, tokens, width)
            nbytes += anchors * layers * 2 * used * (tokens + width) * spec.dtype.itemsize
            flops += anchors * layers * 2 * (2 * used * tokens * width)
        return Work(flops, nbytes)

    def model(self, account: Accounting) -> Work:
        """The model's own: weights read once, the context's K and V once, executed ones written."""
        moved = account.prompt.total + account.prompt.executed
        row = self._spec.kv_bytes_per_token // self._spec.layers
        return Work(account.flops, self.weight_bytes + moved * row)

    def fills(self, method: Method, lengths: Sequence[int]) -> Work:
        """Segments of these lengths reused: source rows read, target rows written, corrections."""
        parts = [self.correction(method, tokens) for tokens in lengths]
        copied = 2 * sum(lengths) * self._spec.kv_bytes_per_token
        return Work(sum(p.flops for p in parts), copied + sum(p.nbytes for p in parts))

    def _references(
        self,
        method: Method,
        request: Request,
        filled: tuple[int, ...],
        known: set[tuple[str, str]],
    ) -> list[int]:
        """Tokens of the context-free references that this request is the first to ask for."""
        if not context_free(method):
            return []
        if request.position == 0 and method.settings()["first_turn"] == "dense":
            return []
        # GraphFlow asks for what it corrects, the others for all that they judge.
        asked = filled if method.name == "graphflow" else tuple(request.prompt.shared())
        new = {(request.workflow.request, request.prompt.slot(i)): i for i in asked}
        missing = [i for key, i in new.items() if key not in known]
        known.update(new)
        return [len(request.prompt.segments[i]) for i in missing]

    def reference(self, tokens: int) -> Work:
        """Prefill of a context-free reference."""
        written = tokens * self._spec.kv_bytes_per_token
        return Work(prefill_flops(self._spec, tokens), self.weight_bytes + written)


@dataclass(frozen=True)
class _GhostSpec(ModelSpec):
    """One hidden dimension, with the FLOPs of another model."""

    of: ModelSpec

    def layer_flops(self, kv_rows: int, rows: int, attended: int) -> int:
        return self.of.layer_flops(kv_rows, rows, attended)


class _Ghost:
    """A :class:`~kvcmas.engine.adapter.ModelAdapter` that computes nothing."""

    def __init__(self, spec: ModelSpec) -> None:
        sizes: Mapping[str, Any] = {"heads": 1, "kv_heads": 1, "head_dim": 2, "hidden": 1, "ffn": 1}
        self.spec: ModelSpec = _GhostSpec(
            layers=spec.layers,
            **sizes,
            vocab=spec.hidden * spec.vocab,
            max_positions=spec.max_positions,
            dtype=torch.float32,
            device=torch.device("cpu"),
            of=spec,
        )
        self.rope = Rope(torch.zeros(1))
        self._generator = torch.Generator().manual_seed(0)

    def embed(self, ids: Tensor) -> Tensor:
        return torch.zeros(len(ids), 1)

    def input_norm(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden

    def project_kv(self, layer: int, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Random: whatever selects by deviation selects anywhere."""
        kv = torch.rand(1, len(normed), 2, generator=self._generator)
        return kv, kv

    def project_q(self, layer: int, normed: Tensor) -> Tensor:
        return torch.zeros(1, len(normed), 2)

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), 1)


class _GhostBuffer(ContiguousBuffer):
    def attend(self, layer: int, q: Tensor, rows: Rows) -> Tensor:
        return q


class _GhostExecutor(Executor):
    def new_buffer(self, rows: int, new_tokens: int = 0) -> ContiguousBuffer:
        spec = self.model.spec
        shape = (spec.layers, 1, rows + new_tokens, spec.head_dim)
        return _GhostBuffer(shape, rows, self.model.rope, spec.dtype, spec.device)


@dataclass(frozen=True)
class _Sources:
    caches: Mapping[int, SegmentCache]

    def held(self, segment: int) -> Held | None:
        cache = self.caches.get(segment)
        return None if cache is None else Held(cache, "source", exact=True)

    def reference(self, segment: int) -> SegmentCache:
        return self.caches[segment]


def _ghost_cache(layers: int, tokens: int, hidden_layers: Sequence[int]) -> SegmentCache:
    """A source cache that takes no memory."""
    kv = torch.ones(1).expand(layers, 1, tokens, 2)
    hidden = {layer: torch.zeros(1).expand(tokens, 1) for layer in hidden_layers}
    return SegmentCache(kv, kv, hidden)
