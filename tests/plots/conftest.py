"""Synthetic runs, as the tests of tables have them."""

from tests.results.conftest import make_replay, make_run

__all__ = ["make_replay", "make_run"]
