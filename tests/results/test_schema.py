"""What a row refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from results.records import EdgeRecord, FidelityEdge, FidelityRecord, Row, SampleRecord, TurnRecord

HASH = st.text("0123456789abcdef", min_size=64, max_size=64)
KEY = st.text("0123456789abcdef", min_size=16, max_size=16)
COUNT = st.integers(0, 2**40)
SECONDS = st.floats(0, 1e6)
POSITIVE = st.floats(1e-9, 1e6)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # any but lone surrogates


@st.composite
def edges(draw: st.DrawFn, layers: int, tokens: int) -> EdgeRecord:
    return EdgeRecord(
        slot=draw(TEXT),
        source=draw(st.none() | TEXT),
        target=draw(TEXT),
        tokens=tokens,
        action=draw(st.sampled_from(["dense", "reuse", "correct", "recompute"])),
        reason=draw(TEXT),
        entropy=draw(st.none() | st.floats(0, 1)),
        shared_entries=layers * tokens,
        executed_entries=draw(st.integers(0, layers * tokens)),
        first=draw(st.booleans()),
    )


@st.composite
def turns(draw: st.DrawFn) -> TurnRecord:
    layers, tokens = draw(st.integers(1, 48)), draw(st.integers(1, 40_000))
    shared = draw(st.integers(0, tokens))
    edge = draw(edges(layers, shared))
    executed = draw(st.integers(edge.executed_entries, layers * tokens))
    reused = draw(st.integers(0, layers * tokens - executed))
    output_tokens = draw(st.integers(0, 500))
    measured = draw(st.booleans())
    return TurnRecord.model_validate(
        {
            "run_key": draw(KEY),
            "sample_id": draw(TEXT),
            "sample_index": draw(COUNT),
            "node": draw(TEXT),
            "turn_index": draw(COUNT),
            "prompt_sha256": draw(HASH),
            "prompt_tokens": tokens,
            "output_tokens": output_tokens,
            "output_ids_sha256": draw(HASH),
            "finish": draw(st.sampled_from(["stop", "length"])),
            "ttft_s": draw(POSITIVE) if output_tokens else None,
            "e2e_s": draw(SECONDS),
            "times_s": draw(st.dictionaries(TEXT, SECONDS, max_size=3)),
            "layers": layers,
            "entries": {
                "reused": reused,
                "corrected": layers * tokens - executed - reused,
                "executed": executed,
                "prefix_hit": 0,
            },
            "touched_rows": draw(COUNT),
            "executed_flops": draw(st.integers(0, 2**70)),
            "reference_tokens": draw(COUNT),
            "edges": [edge],
            "first_token": {
                "kl": draw(SECONDS) if measured else None,
                "agree": draw(st.booleans()) if measured else None,
            },
            "peak_memory_bytes": draw(st.none() | COUNT),
            "source_bytes": draw(COUNT),
            "pool_bytes": draw(COUNT),
            "pool_entries": draw(COUNT),
            "reference_bytes": draw(COUNT),
        }
    )


@st.composite
def replays(draw: st.DrawFn) -> FidelityRecord:
    served = {"kind", "output_tokens", "output_ids_sha256", "finish", "first_token"}
    values = draw(turns()).model_dump(exclude=served | {"peak_memory_bytes"})
    compared = draw(st.integers(1, 8)) if values["ttft_s"] else 0
    for edge in values["edges"]:
        layers = values["layers"] if edge["tokens"] else 0
        errors = st.lists(SECONDS, min_size=layers, max_size=layers)
        edge |= {"k_error": draw(errors), "v_error": draw(errors)}
    return FidelityRecord.model_validate(
        values
        | {
            "last": draw(st.booleans()),
            "warm": draw(st.booleans()),
            "row_layers": values["entries"]["executed"] + draw(COUNT),
            "answer_kl": draw(st.lists(SECONDS, min_size=compared, max_size=compared)),
            "answer_agree": draw(st.lists(st.booleans(), min_size=compared, max_size=compared)),
        }
    )


@st.composite
def samples(draw: st.DrawFn) -> SampleRecord:
    return SampleRecord(
        run_key=draw(KEY),
        sample_id=draw(TEXT),
        sample_index=draw(COUNT),
        correct=draw(st.none() | st.booleans()),
        extracted=draw(st.none() | TEXT),
        expected=draw(TEXT),
        failure=draw(st.none() | TEXT),
        outputs=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        e2e_s=draw(SECONDS),
        ttft_mean_s=draw(st.none() | POSITIVE),
        notes=draw(st.dictionaries(TEXT, st.none() | st.booleans() | COUNT | TEXT, max_size=3)),
    )


@given(row=turns() | replays() | samples())
def test_a_row_is_one_line_and_reads_back_equal(row: Row) -> None:
    line = row.model_dump_json()
    assert "\n" not in line
    assert type(row).model_validate_json(line, strict=True) == row


def test_entries_must_add_up_to_layers_times_prompt(make_turn) -> None:
    counts = {"reused": 8, "corrected": 0, "executed": 31, "prefix_hit": 0}
    with pytest.raises(
        ValidationError, match=r"entries add up to 39, layers x prompt_tokens is 40"
    ):
        make_turn(entries=counts)
    make_turn(entries=counts | {"prefix_hit": 1})


def test_an_edge_counts_layers_times_tokens(make_turn, make_edge) -> None:
    with pytest.raises(ValidationError, match="edge q: 19 shared entries, layers x tokens is 20"):
        make_turn(edges=(make_edge(shared_entries=19),))


def test_an_edge_cannot_execute_more_than_it_shares(make_edge) -> None:
    with pytest.raises(ValidationError, match="21 executed entries of 20"):
        EdgeRecord.model_validate(make_edge(executed=21))


def test_edges_cannot_execute_more_than_the_prompt(make_turn, make_edge) -> None:
    entries = {"reused": 40, "corrected": 0, "executed": 0, "prefix_hit": 0}
    with pytest.raises(ValidationError, match="edges executed 1 entries, the whole prompt 0"):
        make_turn(edges=(make_edge(executed=1),), entries=entries)


def test_shared_segments_fit_into_the_prompt(make_turn, make_edge) -> None:
    entries = {"reused": 0, "corrected": 40, "executed": 0, "prefix_hit": 0}
    with pytest.raises(ValidationError, match="longer than the prompt"):
        make_turn(edges=(make_edge(6), make_edge(5, slot="out0")), entries=entries)


@pytest.mark.parametrize(("ttft", "tokens"), [(0.0, 3), (None, 3), (0.5, 0)])
def test_ttft_is_never_zero_and_absent_exactly_without_a_token(make_turn, ttft, tokens) -> None:
    with pytest.raises(ValidationError, match="ttft_s"):
        make_turn(ttft_s=ttft, output_tokens=tokens)
    assert make_turn(ttft_s=None, output_tokens=0).ttft_s is None


def test_nan_and_unknown_fields_are_refused(make_turn, make_info) -> None:
    with pytest.raises(ValidationError, match="finite"):
        make_turn(e2e_s=float("nan"))
    with pytest.raises(ValidationError, match="extra"):
        make_info(speed=3)


def test_kl_comes_with_agreement(make_turn) -> None:
    with pytest.raises(ValidationError, match="together"):
        make_turn(first_token={"kl": 0.1, "agree": None})


@pytest.mark.parametrize(
    ("k", "v", "tokens", "message"),
    [
        ((0.1,) * 4, (0.1,) * 3, 5, "K errors of 4 layers, V errors of 3"),
        ((0.1,) * 4, (0.1,) * 4, 0, "an empty segment has no error"),
        ((-0.1,) * 4, (0.1,) * 4, 5, "greater than or equal to 0"),
    ],
)
def test_errors_belong_to_a_segment(make_fidelity_edge, k, v, tokens, message) -> None:
    with pytest.raises(ValidationError, match=message):
        FidelityEdge.model_validate(make_fidelity_edge(k, v, tokens=tokens))


def test_errors_cover_every_layer_unless_the_turn_only_warms_up(
    make_fidelity, make_fidelity_edge
) -> None:
    short = make_fidelity_edge((0.1,) * 3, (0.1,) * 3)
    unmeasured = make_fidelity_edge((), ())
    for edge, warm in ((short, False), (short, True), (unmeasured, False)):
        with pytest.raises(ValidationError, match="layers where 4 were expected"):
            make_fidelity(edges=(edge,), warm=warm)
    make_fidelity(edges=(unmeasured,), warm=True)
    make_fidelity(edges=(make_fidelity_edge(0.1, 0.1), make_fidelity_edge(tokens=0)))


def test_kl_and_agreement_are_measured_at_the_same_tokens(make_fidelity) -> None:
    with pytest.raises(ValidationError, match="KL at 2 tokens, agreement at 1"):
        make_fidelity(kl=(0.1, 0.2), answer_agree=(True,))
    for kl in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValidationError, match="answer_kl"):
            make_fidelity(kl=(kl,))


@pytest.mark.parametrize(
    ("ttft", "kl", "warm"),
    [(None, (0.1,), False), (None, (0.1,), True), (0.5, (), False), (0.0, (0.1,), False)],
)
def test_a_replayed_turn_has_a_time_exactly_with_an_answer(make_fidelity, ttft, kl, warm) -> None:
    with pytest.raises(ValidationError, match="ttft_s"):
        make_fidelity(ttft_s=ttft, kl=kl, warm=warm)


def test_a_warm_up_turn_may_have_its_time_alone(make_fidelity) -> None:
    assert make_fidelity(kl=(), warm=True).ttft_s == 0.5
    assert make_fidelity(ttft_s=None, kl=()).answer_kl == ()


def test_replayed_entries_are_checked_as_served_ones(make_fidelity, make_fidelity_edge) -> None:
    with pytest.raises(ValidationError, match="entries add up to 40, layers x prompt_tokens is 44"):
        make_fidelity(prompt_tokens=11)
    with pytest.raises(ValidationError, match="19 shared entries"):
        make_fidelity(edges=(make_fidelity_edge(shared_entries=19),))
    with pytest.raises(ValidationError, match="39 row-layers cannot have executed 40 entries"):
        make_fidelity(row_layers=39)
