"""The queue model: queues computed by hand, bounds in saturation, and records it made itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcmas.errors import UserError
from repro.profiles import load_profile, override
from repro.profiles.serve import ServeProfile
from repro.runners.hop_costs import HopCosts, load_hardware
from repro.runners.modelled import store
from repro.runners.queue_model import Service, kinds, measured_services, simulate, ttfts
from repro.runners.queue_study import Skipped, predict, validate, workload
from repro.runners.serving.capacity import LLAMA_8B
from repro.runners.serving.cells import Cell, Study, make_cells
from repro.runners.serving.engine import Request
from repro.runners.serving.workload import sources_of
from results.headline import errors, summary
from results.records import Run, read_runs
from results.tables import build_table
from tests.served import served_run
from traces import Arrival, GeneratorSettings, arrivals, even_schedule, generate, readings

SETTINGS = GeneratorSettings(vocab=50, scale=64)
SMALL = replace(SETTINGS, workflows=1)


def profile(**changes: object) -> ServeProfile:
    return override(
        load_profile("paper").serve,
        {"repeats": 1, "rho": [0.8], "arrival": {"even": [0]}} | changes,
    )


def cell(method: str, settings: GeneratorSettings = SETTINGS, **changes: object) -> Cell:
    own = profile(methods=[{"method": method}], **changes)
    study = Study(own, workload(settings), 32, {}, None, Path())
    return make_cells(study, own.methods)[0]


def requests(settings: GeneratorSettings = SMALL, *, wait: bool = False) -> list[Request]:
    return [
        Request(flow, turn, i, turn.prompt, {}, sources_of(flow)[turn.node.name] if wait else ())
        for flow in generate(settings)
        for i, turn in enumerate(flow.turns)
    ]


def at(sent: Sequence[Request], times: Iterable[float]) -> list[Arrival]:
    return [Arrival(one.key, time) for one, time in zip(sent, times, strict=True)]


def test_three_requests_by_hand() -> None:
    """The second waits for the first and its anchors, the third for nobody."""
    three = requests()[:3]
    costs = [Service(2.0, after_s=0.5), Service(1.0), Service(3.0)]
    services = {one.key: cost for one, cost in zip(three, costs, strict=True)}
    answered = simulate(three, at(three, (0.0, 1.0, 10.0)), services)
    assert [one.served.started for one in answered] == pytest.approx([0.0, 2.5, 10.0])
    assert [one.served.finished for one in answered] == pytest.approx([2.5, 3.5, 13.0])
    assert ttfts(answered) == pytest.approx([2.0, 2.5, 3.0])


@pytest.mark.parametrize("qps", [0.0, 0.1])
def test_light_load_is_service(qps: float) -> None:
    four = requests()
    services = {one.key: Service(1.0 + i) for i, one in enumerate(four)}
    due = arrivals([four[0].workflow], "even", qps)
    assert ttfts(simulate(four, due, services)) == pytest.approx([1.0, 2.0, 3.0, 4.0])


def test_turns_wait_for_their_sources() -> None:
    """The reader is due first. It is held back only where it reads what the other leaves."""
    for wait, expected in ((False, [1.0, 1.0]), (True, [1.0, 3.0])):
        two = requests(wait=wait)[:2]
        services = {one.key: Service(1.0) for one in two}
        # The source arrives after a second, so a reader that waits has its token at 3 s.
        assert ttfts(simulate(two, at(two, (1.0, 0.0)), services)) == pytest.approx(expected)


def test_steps_of_a_chunked_prefill_end_together() -> None:
    two = requests()[:2]
    services = {one.key: Service(1.0, rows=10) for one in two}
    due = at(two, (0.0, 0.0))
    # Steps of 15 rows: the first one holds all of one request and half of the other.
    assert ttfts(simulate(two, due, services, step_rows=15)) == pytest.approx([1.5, 2.0])
    assert ttfts(simulate(two, due, services, step_rows=20)) == pytest.approx([2.0, 2.0])
    assert ttfts(simulate(two, due, services)) == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize(("rho", "full", "bound"), [(0.8, 31, 2.19), (0.6, 44, 1.55)])
def test_public_schedule_in_saturation(rho: float, full: int, bound: float) -> None:
    """If a reusing hop cost nothing, the queue of 68 would hold 31 (44) full prefills."""
    kvcmas = cell("kvcmas")
    made = even_schedule(kvcmas.study.workload.workflows, rho)
    kvcmas = replace(kvcmas, schedule=made)
    sent = kvcmas.requests()
    kind = kinds(kvcmas, kvcmas.build(), sent)
    assert len(sent) == 68 and sum(k != "reused" for k in kind.values()) == full
    services = {key: Service(1e-9 if k == "reused" else 1.0) for key, k in kind.items()}
    at_once = at(sent, [0.0] * len(sent))
    last = max(one.served.finished for one in simulate(sent, at_once, services))
    assert last == pytest.approx(full, abs=1e-6)
    assert round(68 / last, 2) == bound


def test_saturation_approaches_the_work_bound() -> None:
    """Far beyond capacity a speed-up is a ratio of work; attention moves it a little."""
    hardware = load_hardware()
    rows = predict(
        profile(arrival={"even": [0, 1000]}),
        GeneratorSettings(vocab=50, workflows=6),
        HopCosts(LLAMA_8B),
        hardware.gpu("a100"),
        hardware.utilisation,
    )
    assert len(rows) == 22 and {row.label for row in rows} == {"modelled"}
    for row in rows[11:]:
        assert row.speedup_p50 == pytest.approx(row.work_bound, rel=0.12), row
    kvcmas, alone = ([r for r in rows if r.method == "kvcmas"][i] for i in (3, 0))
    assert kvcmas.qps == 1000 and alone.qps == 0
    assert alone.p50_s < kvcmas.p50_s


def test_a_pool_that_does_not_fit_is_out_of_memory() -> None:
    """C08: KVComm's pool at 8K is larger than 80 GB."""
    hardware = load_hardware()
    found = {}
    for gpu in ("a100", "h200"):
        chosen = profile(methods=[{"method": "nonshared"}, {"method": "kvcomm"}])
        settings = GeneratorSettings(vocab=50, shared=8192, workflows=2)
        costs = HopCosts(LLAMA_8B)
        rows = predict(chosen, settings, costs, hardware.gpu(gpu), hardware.utilisation)
        found[gpu] = rows[1]
    assert found["a100"].out_of_memory and found["a100"].p50_s != found["a100"].p50_s
    assert not found["h200"].out_of_memory and found["h200"].speedup_p50 > 1


def test_cells_on_a_gpu_are_records_and_tables_of_their_own(tmp_path: Path) -> None:
    hardware = load_hardware()
    methods = [{"method": name} for name in ("nonshared", "graphflow", "kvcomm", "kvcmas")]
    rows = predict(
        profile(methods=methods, arrival={"even": [8]}),
        GeneratorSettings(vocab=50, shared=8192, workflows=10),
        HopCosts(LLAMA_8B),
        hardware.gpu("a100"),
        hardware.utilisation,
        records=tmp_path,
    )
    runs = read_runs(tmp_path)
    assert {run.info.kind for run in runs} == {"model"} and len(runs) == 4
    frame = build_table("7-modelled", runs).frame.set_index("method")
    for row, name in zip(rows, ("NonShared", "GraphFlow", "KVComm", "KVCMAS"), strict=True):
        assert frame.loc[name, "work_bound"] == pytest.approx(row.work_bound)
        if name == "KVComm":
            assert frame.loc[name, "state"] == "OOM"
            continue
        assert frame.loc[name, "ttft_p50_s"] == pytest.approx(row.p50_s)
        assert frame.loc[name, "speedup_p90"] == pytest.approx(row.speedup_p90)
    assert "A100" in " ".join(build_table("7-modelled", runs).footer)
    references = {run.info.method: sum(r.reference_tokens for r in run.requests) for run in runs}
    assert references["graphflow"] > 0 == references["nonshared"] == references["kvcmas"]


def test_gates_cannot_be_modelled() -> None:
    live = cell("kvcmas", gate="live")
    with pytest.raises(UserError, match="leaves its reuse to a gate"):
        kinds(live, live.build(), live.requests())


COSTS: Mapping[str, Service] = {
    "first": Service(1.0),
    "dense": Service(1.2, after_s=0.3),
    "reused": Service(0.25),
}


def recorded_run(qps: float, law: str = "even", factor: float = 1.0) -> Run:
    """A run of KVCMAS whose requests took what COSTS says, times ``factor``."""
    planned = cell("kvcmas", arrival={law: [qps]})
    sent = planned.requests()
    kind = kinds(planned, planned.build(), sent)
    services = {
        key: replace(COSTS[k], first_token_s=factor * COSTS[k].first_token_s)
        for key, k in kind.items()
    }
    changes: dict[str, Any] = {
        "scale": 64.0,
        "time_scale": 1.0,
        "qps": qps,
        "arrival": law,
        "capacity": 1.0,
    }
    run = served_run("kvcmas", 1.0, workflows=17, settings=dict(planned.settings), **changes)
    rows = []
    for row, answered in zip(
        run.requests, simulate(sent, planned.arrivals(), services), strict=True
    ):
        served = answered.served
        read = tuple(readings(served.request.workflow))[served.request.position]
        accept = planned.schedule.accept if planned.schedule else {}
        edges = []
        for one in read:
            reused = accept[one.transition] and not one.first
            edges.append(
                row.edges[0].model_copy(
                    update={
                        "slot": one.transition.slot,
                        "tokens": one.tokens,
                        "first": one.first,
                        "action": "correct" if reused else "dense",
                    }
                )
            )
        times = {
            "arrival_s": answered.arrival,
            "released_s": answered.released,
            "started_s": served.started,
            "finished_s": served.finished,
            "ttft_s": served.first_token - answered.arrival,
            "e2e_s": served.finished - answered.arrival,
            "edges": tuple(edges),
        }
        rows.append(row.model_copy(update=times))
    return replace(run, requests=tuple(rows))


def test_a_single_stream_gives_back_its_costs() -> None:
    found = measured_services(recorded_run(0.0).requests)
    assert set(found) == set(COSTS)
    for kind, service in found.items():
        assert service.first_token_s == pytest.approx(COSTS[kind].first_token_s)
        assert service.after_s == pytest.approx(COSTS[kind].after_s)


@pytest.mark.parametrize("law", ["even", "workflow"])
def test_a_loaded_cell_is_predicted_from_a_single_stream(law: str) -> None:
    for factor, check in (
        (1.0, lambda error: abs(error) < 1e-9),
        (2.0, lambda error: error < -0.3),
    ):
        real = [recorded_run(0.0), recorded_run(2.0, law, factor=factor)]
        (made,) = validate(real)
        assert isinstance(made, Run) and made.info.kind == "model"
        assert made.info.serve is not None and made.info.serve.mode == "modelled"
        (row,) = errors([*real, made])
        assert row["n"] == 68 and row["qps"] == 2.0
        assert check(row["error_p50"]) and check(row["error_p90"])


def test_errors_are_a_table_with_their_median() -> None:
    real = [recorded_run(0.0), recorded_run(2.0), recorded_run(4.0, factor=2.0)]
    made = [one for one in validate(real) if isinstance(one, Run)]
    table = build_table("model-check", [*real, *made])
    assert table.frame["qps"].tolist() == [2.0, 4.0]
    assert table.footer[0].startswith("median error of TTFT: p50 ")
    assert "over 2 cells" in table.footer[0]
    assert summary([]) == "median error of TTFT: no cell was predicted"


def test_predictions_are_records(tmp_path: Path) -> None:
    (made,) = validate([recorded_run(0.0), recorded_run(2.0)])
    assert isinstance(made, Run)
    # The edges above have lengths of another trace.
    made = replace(made, requests=tuple(r.model_copy(update={"edges": ()}) for r in made.requests))
    for _ in range(2):  # the second time replaces the first
        store(tmp_path, made)
    (read,) = read_runs(tmp_path)
    assert read.requests == made.requests and read.info == made.info


def test_what_cannot_be_predicted_is_named() -> None:
    (alone,) = validate([recorded_run(2.0)])
    assert isinstance(alone, Skipped) and "single-stream" in alone.reason
    stream = recorded_run(0.0)
    dense = tuple(row for row in stream.requests if row.turn_index == 0)
    (partly,) = validate([replace(stream, requests=dense), recorded_run(2.0)])
    assert isinstance(partly, Skipped) and "no single-stream hop of kind" in partly.reason
