"""The public harness's cost model: charges, schedule, and what an engine is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcmas.errors import UserError
from kvcmas.serving.host import HostOptions
from repro.profiles.serve import ServeMethod, ServeProfile
from repro.runners.emulation.cells import emulated_cells
from repro.runners.emulation.costs import (
    Emulated,
    full_prefills,
    hops,
    load_constants,
    work_bound,
)
from repro.runners.emulation.engine import EmulatedBackend, HFPrefiller
from repro.runners.queue_study import workload
from repro.runners.serving.cells import Cell, Study
from repro.runners.serving.clock import Clock
from repro.runners.serving.loop import Answered, serve
from results.records import EntryCounts
from traces.generator import GeneratorSettings

SETTINGS = GeneratorSettings(vocab=50, workflows=17, scale=16)


def cell(method: str, rho: float = 0.8, settings: dict[str, Any] | None = None) -> Cell:
    profile = ServeProfile(
        model="llama-3.1-8b",
        methods=(ServeMethod(method=method, settings=settings or {}),),
        rho=(rho,),
        arrival={"even": (8,)},
        requests=68,
        pool=0,
        time_scale=1,
    )
    study = Study(profile, workload(SETTINGS), 32, {}, None, Path())
    (found,) = emulated_cells(study, profile.methods, load_constants())
    return found


@pytest.mark.parametrize(("rho", "full", "bound"), [(0.8, 31, 2.19), (0.6, 44, 1.55)])
def test_the_even_schedule_fixes_the_full_prefills(rho: float, full: int, bound: float) -> None:
    """31 and 44 of 68 requests reuse nothing; were the others free, this were the speed-up."""
    kvcmas = cell("kvcmas", rho)
    charged = hops(kvcmas.build(), kvcmas.requests())  # type: ignore[arg-type]
    assert len(charged) == 68 and full_prefills(charged) == full
    assert kvcmas.schedule_settings["full_prefills"] == full
    assert round(68 / full, 2) == bound
    kinds = [hop.kind for hop in charged]
    if rho == 0.8:
        assert [kinds.count(kind) for kind in ("first", "dense", "refill")] == [13, 14, 4]


@pytest.mark.parametrize(
    ("method", "rho", "share"),
    [
        ("nonshared", 0.9, 1.0),
        ("fullshared", 0.9, 0.0),
        ("droidspeak", 0.9, 31 / 32),
        ("droidspeak", 0.8, 31 / 32),
        ("cacheblend", 0.9, 0.8205),
        ("cacheblend", 0.8, 0.9727),
        ("relaycaching", 0.9, 0.8379),
        ("relaycaching", 0.8, 0.9754),
        ("kvcmas", 0.8, 0.0),
    ],
)
def test_executed_shares(method: str, rho: float, share: float) -> None:
    made = load_constants().method(method, rho)
    assert made.executed_share == pytest.approx(share, abs=1e-4)


def test_pages_of_one_token_cost_what_was_selected() -> None:
    true = load_constants({"page_tokens": 1})
    assert true.method("cacheblend", 0.9).executed_share == pytest.approx((1 + 31 * 0.1) / 32)
    assert true.method("cacheblend", 0.9).page_tokens == 1
    assert true.method("kvcmas", 0.8) == load_constants().method("kvcmas", 0.8)


def test_what_methods_are_charged() -> None:
    """One context-free encode a workflow, and who adds which sum."""
    for method, encode, correction in (
        ("kvcmas", False, "low_rank"),
        ("kvcomm", True, "full"),
        ("graphflow", True, "none"),
        ("cacheblend", False, "none"),
    ):
        found = cell(method)
        made = found.build()
        assert isinstance(made, Emulated) and made.correction == correction
        charged = hops(made, found.requests())
        assert [hop.encode for hop in charged[:5]] == ([128, 0, 0, 0, 128] if encode else [0] * 5)
        assert found.bound == pytest.approx(work_bound(charged))
    bounds = {m: cell(m).bound or 0.0 for m in ("nonshared", "cacheblend", "graphflow", "kvcmas")}
    assert bounds["nonshared"] == 1 < bounds["cacheblend"] < bounds["graphflow"] < bounds["kvcmas"]


def test_the_variant_without_chaining_pays_the_encode() -> None:
    other = cell("kvcmas", settings={"chained": False})
    assert other.settings == {"chained": False} and other.label == "chained=False"
    assert other.bound == cell("graphflow").bound
    assert other.key != cell("kvcmas").key


def test_what_cannot_be_emulated_is_said() -> None:
    with pytest.raises(UserError, match="epic has no emulation"):
        cell("epic")
    with pytest.raises(UserError, match=r"emulation\.page_tokens"):
        load_constants({"page_tokens": 0})
    with pytest.raises(UserError, match=r"emulation\.pages"):
        load_constants({"pages": 4})


def test_a_prefix_cache_is_for_engines_without_the_plug_in() -> None:
    assert HostOptions(stock=True, prefix_caching=True).prefix_caching
    with pytest.raises(UserError, match="prefix caching is for stock engines"):
        HostOptions(prefix_caching=True)


class Recorder:
    """A prefix cache by content that remembers what it was sent."""

    engine_name, attention = "recorder", "none"

    def __init__(self) -> None:
        self.sent: list[tuple[str | None, list[int], int]] = []
        self.cached: dict[str, list[int]] = {}

    def reset(self) -> None:
        self.cached.clear()

    def prefill(self, stream: str | None, ids: Sequence[int]) -> int:
        held = self.cached.get(stream or "", [])
        longest = min(len(held), len(ids))
        hit = next((n for n in range(longest) if held[n] != ids[n]), longest)
        if stream is not None:
            self.cached[stream] = list(ids)
        self.sent.append((stream, list(ids), hit))
        return min(hit, len(ids) - 1)

    def forget(self, stream: str) -> None:
        self.cached.pop(stream, None)

    def close(self) -> None: ...


class Sketched:
    """What the engine needs of a sketch."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.vocabulary = type("Vocabulary", (), {"size": 50})()


def served(method: str, prefiller: Any, spec: Any, **changes: Any) -> tuple[Cell, list[Answered]]:
    found = cell(method)
    found = replace(found, **changes)
    clock = Clock("virtual")
    backend = EmulatedBackend(prefiller, Sketched(spec), "cpu", 512)  # type: ignore[arg-type]
    engine = backend.engine(found.build(), clock, topology="fully_connected")
    results = serve(engine, found.requests()[:12], found.arrivals()[:12], clock)
    assert all(isinstance(result, Answered) for result in results)
    return found, [result for result in results if isinstance(result, Answered)]


def test_the_engine_is_sent_prompts_of_the_charged_shape(tiny_llama: tuple) -> None:
    from kvcmas.engine.adapter import TransformersAdapter

    spec = TransformersAdapter(tiny_llama[0]).spec
    for method in ("kvcmas", "graphflow", "cacheblend", "nonshared"):
        recorder = Recorder()
        found, results = served(method, recorder, spec)
        charged = hops(found.build(), found.requests())[:12]  # type: ignore[arg-type]
        for result, hop in zip(results, charged, strict=True):
            fields = result.served.measured
            assert fields["prompt_tokens"] == hop.tokens == len(result.served.request.prompt)
            assert fields["entries"] == EntryCounts(
                reused=0,
                corrected=0,
                executed=spec.layers * (hop.tokens - hop.hit),
                prefix_hit=spec.layers * hop.hit,
            )
            assert fields["reference_tokens"] == hop.encode
            assert fields["prompt_sha256"] == result.served.request.prompt.sha256
        encodes = [ids for stream, ids, hit in recorder.sent if len(ids) == 128 and not stream]
        assert len(encodes) == (3 if method == "graphflow" else 0)
        assert not recorder.cached, "finished workflows are forgotten"


def test_transformers_hits_what_the_plan_says(tiny_llama: tuple) -> None:
    from kvcmas.engine.adapter import TransformersAdapter
    from repro.models import resolve

    spec = TransformersAdapter(tiny_llama[0]).spec
    prefiller = HFPrefiller(resolve("tiny-llama"), "auto", "cpu")
    found, results = served("kvcmas", prefiller, spec)
    charged = hops(found.build(), found.requests())[:12]  # type: ignore[arg-type]
    hits = [result.served.measured["entries"].prefix_hit // spec.layers for result in results]
    assert hits == [hop.hit for hop in charged] and sum(hits) > 0
    assert {"reference", "correct", "prefill"} == set(results[0].served.measured["times_s"])
