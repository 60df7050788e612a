"""`repro analyze` on tiny-llama: spectra, chaining, coverage, and the files they are written to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.executor import Executor
from kvcmas.engine.workflow import fully_connected
from kvcmas.errors import UserError
from plots import style
from repro.cli import app
from repro.runners.analysis import exact_turns
from repro.runners.analysis_chain import Chain
from repro.runners.analysis_coverage import Coverage, ReuseError, mean_deviation
from repro.runners.analysis_ranks import effective_rank, energies, rank_rows, retained
from results.analysis import KINDS, Analysis, ChainRow, CoverageRow, RankRow
from tests.workflows import recorded
from traces.schema import TraceWorkflow, write_trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORKFLOW = fully_connected(3)
PREFIX = (0,)


@pytest.fixture(scope="module")
def hf(request: pytest.FixtureRequest) -> PreTrainedModel:
    return request.getfixturevalue("tiny_llama")[0]


@pytest.fixture(scope="module")
def model(hf: PreTrainedModel) -> TransformersAdapter:
    return TransformersAdapter(hf)


@pytest.fixture(scope="module")
def workflows(model: TransformersAdapter) -> tuple[TraceWorkflow, ...]:
    """Four requests with queries of 40 tokens and more, outputs of 12."""
    return recorded(model, WORKFLOW, 4, query=40, new_tokens=12)


@pytest.fixture(scope="module")
def ranks(model: TransformersAdapter, workflows: tuple[TraceWorkflow, ...]) -> pd.DataFrame:
    return _frame(RankRow, rank_rows(Executor(model), workflows[0], PREFIX))


@pytest.fixture(scope="module")
def chained(model: TransformersAdapter, workflows: tuple[TraceWorkflow, ...]) -> pd.DataFrame:
    chain = Chain(model, WORKFLOW.name, workflows[1:], reference_prefix=PREFIX, settings={})
    return _frame(ChainRow, chain.rows(workflows[0]))


def _frame(
    row: type[RankRow] | type[ChainRow] | type[CoverageRow],
    rows: Iterable[RankRow | ChainRow | CoverageRow],
) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=row._fields)


def _matrix(energy: list[float], tokens: int, width: int) -> Tensor:
    """One layer with these squared singular values."""
    generator = torch.Generator().manual_seed(0)
    rank = len(energy)
    left = torch.linalg.qr(torch.randn(tokens, rank, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(width, rank, generator=generator, dtype=torch.float64)).Q
    return (left * torch.tensor(energy, dtype=torch.float64).sqrt()) @ right.mT


@pytest.mark.parametrize(("tokens", "width"), [(40, 12), (12, 40)])
def test_energies_are_squared_singular_values(tokens: int, width: int) -> None:
    z = torch.randn(3, tokens, width, generator=torch.Generator().manual_seed(1))
    expected = torch.linalg.svdvals(z.double()).square()
    torch.testing.assert_close(energies(z), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("energy", "rank"),
    [
        ([1.0], 1),
        ([90.0, 10.0], 1),  # exactly 90%
        ([89.0, 11.0], 2),
        ([50.0, 30.0, 15.0, 5.0], 3),
        ([1.0] * 10, 9),
        ([1.0] * 30, 27),
    ],
)
@pytest.mark.parametrize(("tokens", "width"), [(64, 32), (32, 64)])
def test_effective_rank_of_known_spectra(
    energy: list[float], rank: int, tokens: int, width: int
) -> None:
    found = energies(_matrix(energy, tokens, width)[None])
    assert effective_rank(found).tolist() == [rank]


def test_zero_has_rank_zero_and_loses_nothing() -> None:
    energy = energies(torch.zeros(1, 5, 4))
    assert effective_rank(energy).tolist() == [0]
    assert retained(energy, 1).tolist() == [1.0]


def test_retained_energy_is_that_of_the_best_approximation() -> None:
    z = torch.randn(1, 30, 20, generator=torch.Generator().manual_seed(2)).double()
    u, s, v = torch.linalg.svd(z, full_matrices=False)
    best = (u[..., :7] * s[..., None, :7]) @ v[..., :7, :]
    lost = ((z - best).norm() / z.norm()).square()
    assert float(retained(energies(z), 7)) == pytest.approx(1 - float(lost), abs=1e-9)


def test_every_kind_and_layer_has_rows(ranks: pd.DataFrame, model: TransformersAdapter) -> None:
    assert set(ranks["kind"]) == set(KINDS)
    assert set(ranks["layer"]) == set(range(model.spec.layers))
    assert set(ranks["width"]) == {model.spec.kv_heads * model.spec.head_dim}
    ranked = ranks.dropna(subset="effective_rank")
    assert (ranked["effective_rank"] <= ranked[["tokens", "width"]].min(axis=1)).all()


def test_edges_have_a_base_and_a_delta(ranks: pd.DataFrame) -> None:
    edges = ranks[(ranks["kind"] == "delta") & (ranks["layer"] == 1) & (ranks["tensor"] == "k")]
    found = set(zip(edges["slot"], edges["source"], edges["target"], strict=True))
    assert found == {
        ("q", "A0", "A1"),
        ("q", "A1", "A2"),
        ("out0", "A0", "A1"),
        ("out0", "A1", "A2"),
        ("out1", "A1", "A2"),
    }
    bases = ranks[(ranks["kind"] == "base") & (ranks["layer"] == 1) & (ranks["tensor"] == "k")]
    assert len(bases) == len(edges)


def test_layer_0_of_a_delta_is_zero_and_has_no_rank(ranks: pd.DataFrame) -> None:
    deltas = ranks[ranks["kind"] != "base"]
    first, rest = deltas[deltas["layer"] == 0], deltas[deltas["layer"] > 0]
    assert (first["relative_norm"] < 1e-5).all()
    assert first["effective_rank"].isna().all()
    assert (rest["relative_norm"] > 1e-2).all()
    assert rest["effective_rank"].notna().all()


def test_workflow_deltas_of_the_query_are_system_deltas(ranks: pd.DataFrame) -> None:
    query = ranks[(ranks["slot"] == "q") & (ranks["layer"] > 0)]
    keys = ["source", "target", "tensor", "layer"]
    delta = query[query["kind"] == "delta"].set_index(keys)
    system = query[query["kind"] == "pf_system"].set_index(keys)
    assert len(system) > len(delta)  # any two agents, not only those in succession
    pd.testing.assert_series_equal(
        delta["relative_norm"], system.loc[delta.index, "relative_norm"], check_exact=True
    )


def test_glue_delta_equals_two_forward_passes_of_transformers(
    ranks: pd.DataFrame, hf: PreTrainedModel, workflows: tuple[TraceWorkflow, ...]
) -> None:
    segments = workflows[0].turns[1].prompt.segments  # system, q, glue, out0, tail
    tokens, glue = len(segments[3]), segments[2]

    def values(ids: list[int]) -> list[Tensor]:
        with torch.inference_mode():
            cache = hf(torch.tensor([ids]), use_cache=True).past_key_values
        return [layer.values[0, :, -tokens:].double() for layer in cache.layers]

    ids = [[i for s in (*segments[:2], *rest) for i in s.ids] for rest in (segments[2:4], [])]
    with_glue, without = values(ids[0]), values(ids[1] + list(segments[3].ids))
    expected = [float((a - b).norm() / a.norm()) for a, b in zip(with_glue, without, strict=True)]
    rows = ranks[
        (ranks["kind"] == "pf_glue") & (ranks["target"] == "A1") & (ranks["tensor"] == "v")
    ]
    assert rows["pf_tokens"].unique().tolist() == [len(glue)]
    assert rows["relative_norm"].tolist() == pytest.approx(expected, abs=1e-4)


def test_chained_first_agent_is_exact(chained: pd.DataFrame) -> None:
    first = chained[(chained["node"] == "A0") & (chained["correction"] == "kvcmas")]
    by_reference = first.groupby("reference")["error"].max()
    assert by_reference["source"] == 0
    assert by_reference["context-free"] > 1e-2


def test_every_correction_is_accepted_and_layer_0_exact(chained: pd.DataFrame) -> None:
    kvcmas = chained[chained["correction"] == "kvcmas"]
    held = kvcmas[kvcmas["holder"].notna()]
    assert set(held["action"]) == {"correct"}
    assert (held["covered"] > 0).all()
    assert (chained[chained["layer"] == 0]["error"] < 1e-5).all()
    assert (held[held["layer"] > 0]["error"] > 1e-3).all()


def test_plain_reuse_from_an_exact_source_is_the_delta(
    chained: pd.DataFrame, ranks: pd.DataFrame
) -> None:
    """At A1 everything comes from A0, which is exact."""
    plain = chained[
        (chained["node"] == "A1")
        & (chained["reference"] == "source")
        & (chained["correction"] == "none")
    ]
    delta = ranks[(ranks["kind"] == "delta") & (ranks["target"] == "A1")]
    keys = ["slot", "tensor", "layer"]
    pd.testing.assert_series_equal(
        plain.set_index(keys)["error"].sort_index(),
        delta.set_index(keys)["relative_norm"].sort_index(),
        check_names=False,
        atol=1e-6,
    )


def test_chain_refuses_what_cannot_be_compared(
    model: TransformersAdapter, workflows: tuple[TraceWorkflow, ...]
) -> None:
    with pytest.raises(UserError, match="--warm"):
        Chain(model, WORKFLOW.name, (), reference_prefix=PREFIX, settings={})
    with pytest.raises(UserError, match="chained"):
        Chain(model, WORKFLOW.name, workflows, reference_prefix=PREFIX, settings={"chained": True})


@pytest.fixture(scope="module")
def error(model: TransformersAdapter, workflows: tuple[TraceWorkflow, ...]) -> ReuseError:
    turns = list(exact_turns(Executor(model), workflows[0], received=True))
    assert ReuseError.of(turns[0]) is None  # nobody held anything
    found = ReuseError.of(turns[2])
    assert found is not None
    return found


def test_reuse_error_adds_up(error: ReuseError, ranks: pd.DataFrame) -> None:
    """Per tensor it is the relative norm of the delta."""
    deltas = ranks[(ranks["kind"] == "delta") & (ranks["target"] == "A2")]["relative_norm"]
    energy, norm = error.total()
    assert energy == pytest.approx(float(deltas.pow(2).sum()), rel=1e-5)
    assert norm == pytest.approx(float(deltas.sum()), rel=1e-5)
    assert error.tokens == 40 + 12 + 12
    nothing = torch.zeros(error.tokens, dtype=torch.bool)
    assert error.total(nothing) == (0, 0)


def test_attention_is_relative_to_its_segment(error: ReuseError) -> None:
    for segment in range(3):
        assert float(error.attention[error.segment == segment].mean()) == pytest.approx(1)


@pytest.fixture(scope="module")
def covered(model: TransformersAdapter, workflows: tuple[TraceWorkflow, ...]) -> pd.DataFrame:
    executor = Executor(model)
    criteria = Coverage(mean_deviation(executor, workflows[2:]), (0.75, 0.5, 0.0), 300, seed=0)
    frame = _frame(CoverageRow, criteria.rows(executor, workflows[0]))
    frame["coverage"] = 1 - frame["energy_after"] / frame["energy_before"]
    return frame


@pytest.mark.parametrize("unit", ["layer", "token"])
def test_random_selection_covers_its_budget(covered: pd.DataFrame, unit: str) -> None:
    chance = covered[(covered["criterion"] == "random") & (covered["unit"] == unit)]
    assert chance["coverage"].tolist() == pytest.approx(chance["budget"].tolist(), abs=0.04)


@pytest.mark.parametrize("unit", ["layer", "token"])
def test_nothing_beats_the_oracle(covered: pd.DataFrame, unit: str) -> None:
    table = covered[covered["unit"] == unit].pivot(
        index=["node", "rho"], columns="criterion", values="coverage"
    )
    for criterion in table.columns:
        assert (table["oracle"] >= table[criterion] - 1e-12).all(), criterion
    assert (table.loc[pd.IndexSlice[:, 0.5], "oracle"] > 0.5).all()


def test_everything_selected_covers_everything(covered: pd.DataFrame) -> None:
    full = covered[covered["rho"] == 0]
    assert (full["energy_after"] == 0).all()
    assert (full["norm_after"] == 0).all()


def test_layer_selection_never_spends_on_layer_0(
    model: TransformersAdapter, workflows: tuple[TraceWorkflow, ...]
) -> None:
    deviation = mean_deviation(Executor(model), workflows[:1])
    assert int(deviation.argmin()) == 0
    assert float(deviation[0]) < 1e-5


def test_coverage_refuses_bad_input(model: TransformersAdapter) -> None:
    with pytest.raises(UserError, match="outside"):
        Coverage(torch.ones(4), (1.5,), 1, seed=0)
    with pytest.raises(UserError, match="draw"):
        Coverage(torch.ones(4), (0.9,), 0, seed=0)
    with pytest.raises(UserError, match="--calibration"):
        mean_deviation(Executor(model), ())


@pytest.fixture(scope="module")
def trace(
    model: TransformersAdapter,
    workflows: tuple[TraceWorkflow, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(
        path,
        workflows,
        kind="generated",
        topology=WORKFLOW.name,
        vocab=model.spec.vocab,
        origin={},
    )
    return path


@pytest.mark.parametrize(
    ("command", "options", "figures"),
    [
        ("ranks", ["--figure"], ("figure2", "figure7")),
        ("chain", ["--figure", "--kvcmas", "rank_delta=8"], ("figure3",)),
        ("coverage", ["--rho", "0.5", "--draws", "2"], ()),
    ],
)
def test_command_writes_csv_with_its_provenance(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    options: list[str],
    figures: tuple[str, ...],
) -> None:
    monkeypatch.setattr(style, "FORMATS", ("svg",))  # one is quicker than three
    arguments = ["analyze", command, "--model", "tiny-llama", "--trace", str(trace)]
    arguments += ["--warm", "2", "--calibration", "1", "--n", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*arguments, *options])
    assert done.exit_code == 0, done.output
    for name in (command, f"{command}-summary"):
        found = Analysis.read(tmp_path / f"{name}.csv", name)
        assert found.provenance["model"].startswith("tiny-llama@")
        assert found.provenance["dtype"] == "float32"
        assert found.provenance["n"] == "1"
        assert len(found.provenance["trace_sha256"]) == 64
        assert {"git_commit", "command"} <= set(found.provenance)
        assert len(found.notes) and len(found.frame)
    assert set(Analysis.read(tmp_path / f"{command}.csv", command).frame["request"]) == {"r3"}
    drawn = {path.stem for path in tmp_path.iterdir() if path.suffix == ".svg"}
    assert drawn == set(figures)


def test_a_trace_of_another_vocabulary_is_refused(
    workflows: tuple[TraceWorkflow, ...], tmp_path: Path
) -> None:
    path = tmp_path / "other.jsonl"
    write_trace(path, workflows, kind="generated", topology=WORKFLOW.name, vocab=32_000, origin={})
    arguments = ["analyze", "ranks", "--model", "tiny-llama", "--trace", str(path)]
    arguments += ["--warm", "0", "--calibration", "0", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, UserError)
    assert "32000" in str(done.exception)
