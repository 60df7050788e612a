"""Synthetic files of `repro analyze` for the tests of figures, tables and claims."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from results.analysis import KINDS, RETAINED, Analysis, ChainRow, CoverageRow, RankRow

PROVENANCE = {
    "model": "some-model@0123456789abcdef",
    "dtype": "float32",
    "device": "cpu (Some CPU)",
    "bench": "gsm8k",
    "data": "procedural",
    "workflow": "fully_connected",
    "n": "3",
    "trace_sha256": "ab" * 32,
    "warm": "2",
    "git_commit": "abc1234",
    "command": "repro analyze x --out /somewhere/else",
}
REQUESTS = ("a", "b", "c")
LAYERS = range(1, 4)


def ranks(of: dict[str, int], energy: float = 0.95, **provenance: str) -> Analysis:
    """Segments of 80 tokens whose effective rank depends on the kind alone."""
    rows = [
        RankRow(  # type: ignore[arg-type]
            request,
            kind,
            "q",
            "A0",
            None if kind == "base" else "A1",
            tensor,
            layer,
            80,
            192,
            None,
            None,
            of.get(kind, 50),
            energy,
            *(0.5 for _ in RETAINED),
        )
        for request, kind, tensor, layer in product(REQUESTS, KINDS, "kv", LAYERS)
    ]
    return Analysis.of("ranks", RankRow, rows, PROVENANCE | provenance)


def chain(chained: float, non_chained: float, first: float = 0.0, **provenance: str) -> Analysis:
    """Two agents; the first one's error is 0 where it is chained, unless ``first`` says more."""
    rows = []
    variants = (("source", chained), ("context-free", non_chained))
    for request, (reference, error), correction, turn, tensor, layer in product(
        REQUESTS, variants, ("kvcmas", "none"), range(3), "kv", LAYERS
    ):
        exact = reference == "source" and turn == 0
        rows.append(
            ChainRow(  # type: ignore[arg-type]
                request,
                reference,
                correction,
                f"A{turn}",
                turn,
                "q",
                None if turn == 0 else f"A{turn - 1}",
                "dense" if exact else "correct" if correction == "kvcmas" else "reuse",
                80,
                80,
                tensor,
                layer,
                first if exact else error,
            )
        )
    return Analysis.of("chain", ChainRow, rows, PROVENANCE | provenance)


def coverage(removed: dict[str, float], rhos: Sequence[float] = (0.9, 0.8)) -> Analysis:
    """Every selection removes its share, random selection the budget's."""
    units = {"layer": "layer", "deviation": "token", "attention": "token"}
    rows = []
    for request, rho, (criterion, unit) in product(REQUESTS, rhos, units.items()):
        for name, share in ((criterion, removed[criterion]), ("random", 1 - rho)):
            rows.append(
                CoverageRow(  # type: ignore[arg-type]
                    *(request, "A1", unit, name, rho, 80, 8, 1 - rho),
                    *(1.0, 1 - share, 1.0, 1 - share),
                )
            )
    return Analysis.of("coverage", CoverageRow, rows, PROVENANCE)
