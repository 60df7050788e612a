"""The paper's statements about memory (C08 to C13, C35) beside the byte calculator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvcmas.registry import make_method
from repro.models.published import Figures, figures
from repro.runners.memory_model import (
    MemoryBytes,
    layout_graph,
    layout_turns,
    memory_bytes,
    pool_bytes,
)
from results.claims import Claim, PaperSettings, Verdict, load_ledger
from results.verdicts import judge_value
from traces.generator import GeneratorSettings, LayoutName

_GB, _GIB = 10**9, 2**30
_LLAMA, _LLAVA = "llama-3.1-8b", "llava-onevision-7b"


@dataclass(frozen=True)
class Row:
    """One number of the paper, or a formula of its, beside ours.

    Attributes:
        paper: None where the paper says nothing about this quantity.
        relation: as in the ledger; ``reading`` counts something else than the row before it.
        verdict: by the ledger's rule for the claim; None for readings and without ``paper``.
    """

    claim: str
    quantity: str
    relation: str
    paper: float | None
    ours: float
    unit: str
    verdict: Verdict | None

    @property
    def gap(self) -> float | None:
        """Ours minus the paper's, where a value is claimed and not only a bound."""
        if self.paper is None or self.relation == "above":
            return None
        return self.ours - self.paper


@dataclass(frozen=True)
class Finding:
    """A claim's rows, and what was assumed for them."""

    rows: tuple[Row, ...]
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """A model in the paper's single-stream or serving layout."""

    model: Figures
    agents: int
    shared: int
    output: int = 128
    layout: LayoutName = "T"

    def bytes(self, method: str, settings: Mapping[str, Any]) -> MemoryBytes:
        """All categories of a method here."""
        lengths = GeneratorSettings(
            vocab=1, layout=self.layout, shared=self.shared, output=self.output
        ).lengths
        turns = layout_turns(lengths, layout_graph(self.layout, self.agents, 1))
        made = make_method(method, settings)
        return memory_bytes(made, turns, self.model.spec, self.model.weight_bytes)

    def pool(self, method: str, settings: Mapping[str, Any], edges: int) -> int:
        """Bytes of the query's pool alone, where each of ``edges`` agents is corrected."""
        lengths = GeneratorSettings(vocab=1, layout="L0", shared=self.shared).lengths
        turns = layout_turns(lengths, layout_graph("L0", edges, 1))
        return pool_bytes(make_method(method, settings), turns, self.model.spec).total


def memory_findings() -> list[Finding]:
    """Every claim about bytes, judged by formula."""
    ledger = load_ledger()
    claims, paper = {claim.id: claim for claim in ledger.claims}, ledger.paper
    llama = figures(_LLAMA)
    return [
        _serving(claims["C08"], paper, llama),
        _workloads(claims["C09"], paper),
        _by_context(claims["C10"], paper, llama),
        _same_capacity(claims["C11"], claims["C10"], paper, llama),
        _one_slot(claims["C12"], paper, llama),
        _complexity(claims["C13"], paper, llama),
        _high_ranks(claims["C35"], llama),
    ]


def _serving(claim: Claim, paper: PaperSettings, llama: Figures) -> Finding:
    kvcomm = {"capacity": paper.pool_capacity_kvcomm}
    points = ((8192, 128), (32_768, 128), (2048, 2048))
    here = Setting(llama, paper.traces.agents, 0)
    needs = [
        replace(here, shared=shared, output=output).bytes("kvcomm", kvcomm).held / _GB
        for shared, output in points
    ]
    small = replace(here, shared=2048).bytes("kvcomm", kvcomm).held / _GB
    return Finding(
        (*_rows(claim, needs), _own(claim, "KVComm memory at 2K shared", small, "GB")),
        (
            f"{here.agents} agents, one workflow at a time, layout T, the first agent corrected",
            "under concurrent serving the other workflows' caches come on top",
        ),
    )


def _workloads(claim: Claim, paper: PaperSettings) -> Finding:
    video = paper.workloads["videomme"]
    shared = (video.frames or 0) * (video.tokens_per_frame or 0)
    here = Setting(figures(_LLAVA), paper.task_agents + 1, shared, layout="L0")
    kvcomm, kvcmas = _defaults(here, paper)
    return Finding(
        tuple(_rows(claim, [kvcomm.held / kvcmas.held])),
        (
            f"Video-MME, the longest workload: {video.frames} frames of {video.tokens_per_frame}"
            f" tokens, {here.agents} agents that share them",
            "lengths of questions, prompts and outputs are not published: layout L0, no other PH",
        ),
    )


def _by_context(claim: Claim, paper: PaperSettings, llama: Figures) -> Finding:
    ratios, own = [], []
    for shared, value in zip(paper.traces.shared_tokens, _stated(claim), strict=True):
        kvcomm, kvcmas = _defaults(Setting(llama, 3, shared), paper)
        ratios.append(kvcomm.held / kvcmas.held)
        name = f"at {shared // 1024}K"
        own += [
            _reading(
                claim,
                f"the same without source caches and references {name}",
                value,
                _pool_beside_active(kvcomm) / _pool_beside_active(kvcmas),
                "x",
            ),
            _own(claim, f"KVComm memory {name}", kvcomm.held / _GB, "GB"),
            _own(claim, f"KVCMAS memory {name}", kvcmas.held / _GB, "GB"),
        ]
    return Finding(
        (*_rows(claim, ratios), *own),
        (
            "three agents, 128 output tokens, layout T; the paper publishes neither its formula nor"
            " the layout of its single stream",
            f"default capacities: KVComm V={paper.pool_capacity_kvcomm},"
            f" KVCMAS V={paper.pool_capacity} and rank {paper.rank_base}",
        ),
    )


def _same_capacity(
    claim: Claim, by_context: Claim, paper: PaperSettings, llama: Figures
) -> Finding:
    capacity = {"capacity": paper.pool_capacity_kvcomm}
    here = Setting(llama, 3, 32_768)
    kvcmas = here.bytes("kvcmas", capacity)
    kvcomm = here.bytes("kvcomm", capacity)
    shared = here.bytes("kvcmas", {**capacity, "base": "shared"})
    cache = here.shared * llama.spec.kv_bytes_per_token
    formulas = [
        kvcomm.weights + kvcomm.active + capacity["capacity"] * (1 + n) * cache for n in (3, 4)
    ]
    more = paper.pool_capacity_kvcomm - paper.pool_capacity
    anchors = [
        replace(here, agents=agents).bytes("kvcmas", {"capacity": more}).pool.total
        for agents in (2, here.agents)
    ]
    low, high = _stated(claim)
    ten = low - high / _stated(by_context)[-1]
    readings = (
        ("KVCMAS without source caches", low, _pool_beside_active(kvcmas)),
        ("KVCMAS with one base per anchor (3.3)", low, shared.held),
        ("KVCMAS while an anchor is built", low, kvcmas.total),
        ("KVCMAS, ten more anchors", ten, anchors[1]),
        ("KVCMAS, ten more anchors of one edge", ten, anchors[0]),
        ("KVComm without references", high, _pool_beside_active(kvcomm)),
        ("KVComm, V (1 + N) full caches of the query, N=3", high, formulas[0]),
        ("KVComm, V (1 + N) full caches of the query, N=4", high, formulas[1]),
    )
    return Finding(
        (
            *_rows(claim, [kvcmas.held / _GB, kvcomm.held / _GB]),
            *(_reading(claim, name, paper_gb, n / _GB, "GB") for name, paper_gb, n in readings),
        ),
        (
            "three agents, 128 output tokens, layout T, GB = 10^9; the paper does not publish which"
            " caches it counts, how many consumers an anchor has, nor which GB it means",
            "KVCMAS: a base and a delta per edge (A.3), two edges of the query; KVComm: one base,"
            " three deltas, the first agent corrected as well",
            "ten more anchors: KVCMAS at V=20 less KVCMAS at V=10, which in the paper is KVComm's"
            " memory over its ratio at 32K (C10)",
        ),
    )


def _one_slot(claim: Claim, paper: PaperSettings, llama: Figures) -> Finding:
    here = Setting(llama, 4, 4096)
    capacity = paper.pool_capacity_kvcomm
    stored = here.pool("kvcomm", {"capacity": capacity}, 4)
    formula = capacity * (1 + here.agents) * here.shared * llama.spec.kv_bytes_per_token
    lowrank = here.pool("kvcmas", {"capacity": capacity, "chained": False, "base": "shared"}, 4)
    name = "V (1 + N) caches of the segment"
    return Finding(
        (
            *_rows(claim, [stored / _GIB]),
            _reading(claim, name, _stated(claim)[0], formula / _GIB, "GiB"),
            _own(claim, f"the same at rank {paper.rank_base}", lowrank / _GIB, "GiB"),
        ),
        ("4096 tokens, N=4 corrected agents; deltas are stored from layer 1: in layer 0 it is 0",),
    )


def _complexity(claim: Claim, paper: PaperSettings, llama: Figures) -> Finding:
    rank, edges = paper.rank_base, 4
    width = llama.spec.kv_heads * llama.spec.head_dim
    capacity = {"capacity": paper.pool_capacity_kvcomm}
    rows = []
    for shared in paper.traces.shared_tokens:
        here = Setting(llama, edges, shared)
        full = here.pool("kvcomm", capacity, edges)
        same = here.pool("kvcmas", {**capacity, "chained": False, "base": "shared"}, edges)
        default = here.pool("kvcmas", capacity, edges)
        formula = shared * width / (rank * (shared + width))
        name = f"at {shared // 1024}K"
        verdict = judge_value(claim, "equal", full / same, formula)
        rows += [
            Row(claim.id, f"L D / (r (L + D)) {name}", "equal", formula, full / same, "x", verdict),
            _own(claim, f"chained, a base per edge, {name}", full / default, "x"),
        ]
    return Finding(
        tuple(rows),
        (
            f"pool of one slot, V={capacity['capacity']}, N={edges}, D={width}, r={rank}: full-rank"
            " over low-rank bytes; the paper's column is its formula",
            f"chained: {edges - 1} edges for {edges} agents, because the first one is dense",
        ),
    )


def _high_ranks(claim: Claim, llama: Figures) -> Finding:
    found = Setting(llama, 3, 32_768).bytes("kvcmas", {"rank_base": 128, "rank_delta": 128})
    stated = _stated(claim)[0]
    return Finding(
        (
            *_rows(claim, [found.held / _GB]),
            _reading(claim, "KVCMAS while an anchor is built", stated, found.total / _GB, "GB"),
            _reading(
                claim,
                "KVCMAS without source caches",
                stated,
                _pool_beside_active(found) / _GB,
                "GB",
            ),
        ),
        ("three agents, 128 output tokens, layout T, V=10, a base per edge",),
    )


def _defaults(here: Setting, paper: PaperSettings) -> tuple[MemoryBytes, MemoryBytes]:
    """KVComm and KVCMAS at the paper's capacities and ranks."""
    ranks = {"rank_base": paper.rank_base, "rank_delta": paper.rank_delta}
    return (
        here.bytes("kvcomm", {"capacity": paper.pool_capacity_kvcomm}),
        here.bytes("kvcmas", {"capacity": paper.pool_capacity, **ranks}),
    )


def _pool_beside_active(memory: MemoryBytes) -> int:
    """Weights, one buffer and the pool: no source caches, no references."""
    return memory.weights + memory.active + memory.pool.total


def _stated(claim: Claim) -> list[float]:
    """The paper's numbers, in the ledger's order."""
    return [value.value for value in claim.paper_values if value.value is not None]


def _rows(claim: Claim, ours: list[float]) -> list[Row]:
    """The claim's own numbers beside ours, judged."""
    stated = zip(claim.paper_values, _stated(claim), ours, strict=True)
    return [
        Row(
            claim.id,
            value.quantity,
            value.relation,
            paper,
            our,
            value.unit,
            judge_value(claim, value.relation, our, paper),
        )
        for value, paper, our in stated
    ]


def _reading(claim: Claim, quantity: str, paper: float, ours: float, unit: str) -> Row:
    return Row(claim.id, quantity, "reading", paper, ours, unit, None)


def _own(claim: Claim, quantity: str, value: float, unit: str) -> Row:
    return Row(claim.id, quantity, "", None, value, unit, None)
