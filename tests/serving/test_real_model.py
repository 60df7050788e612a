"""The eight methods of the paper on a real model of 30 layers, on both engines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.play import Pair
from tests.serving.test_equality import assert_equal, names

pytestmark = [pytest.mark.vllm, pytest.mark.model]

HEADLINE: list[tuple[str, dict[str, Any], bool]] = [
    ("nonshared", {}, False),
    ("fullshared", {}, False),
    ("droidspeak", {"blocks": ((8, 13),)}, False),
    ("tests.serving.methods:RecordedCacheBlend", {"ratio": 0.2}, False),
    ("tests.serving.methods:RecordedRelay", {"span": (6, 7, 20), "ratio": 0.3}, False),
    ("graphflow", {"n_cal": 2}, True),
    ("kvcomm", {}, True),
    ("kvcmas", {}, True),
]


@pytest.mark.parametrize("pair", ["smollm2"], indirect=True)
@pytest.mark.parametrize(("method", "settings", "forces"), HEADLINE, ids=names(HEADLINE))
def test_first_tokens_equal_on_a_real_model(
    pair: Pair, method: str, settings: dict[str, Any], forces: bool
) -> None:
    assert_equal(pair, method, settings, forces)
