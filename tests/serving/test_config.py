"""A server's settings."""

from __future__ import annotations

from typing import Any

import pytest

from kvcmas.errors import UserError
from kvcmas.method.kvcmas import KVCMAS
from kvcmas.serving.config import ServingConfig


def test_a_method_with_settings_is_made_afresh_each_time() -> None:
    config = ServingConfig.parse({"method": "kvcmas", "settings": {"tau": 0.5}})
    first, second = config.make_method(), config.make_method()
    assert isinstance(first, KVCMAS)
    assert first.tau == 0.5
    assert first is not second


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"method": "kvcmass"}, "unknown method 'kvcmass'; did you mean kvcmas"),
        ({"settings": {"taus": 1}}, "kvcmas has no setting 'taus'"),
        ({"pool_scope": "planet"}, "kv_connector_extra_config.pool_scope"),
        ({"row_budget": 0}, "kv_connector_extra_config.row_budget"),
        ({"typo": 1}, "kv_connector_extra_config.typo"),
    ],
)
def test_bad_settings_stop_the_server_with_one_line(extra: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        ServingConfig.parse(extra)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
