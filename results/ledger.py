"""The committed verdicts: what the claim ledger said when somebody last looked at it.

``verdicts.json`` holds one item per claim with its verdict, the numbers behind it, their setting,
the keys of the records and the command that makes such records. It is written by a command, and
compared with what the records say now.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from results.claims import LedgerRow, Measured
from results.errors import ClaimError

VERDICTS_FILE: Final = "verdicts.json"
# The last digits of a statistic depend on the machine.
_DIGITS: Final = 6


def as_text(rows: Sequence[LedgerRow]) -> str:
    """The ledger as JSON, one line per number."""
    return json.dumps([_item(row) for row in rows], indent=1, ensure_ascii=False) + "\n"


def changes(rows: Sequence[LedgerRow], path: Path) -> list[str]:
    """One line for every claim whose verdict is not the committed one.

    Raises ClaimError if the file is not a ledger.
    """
    try:
        committed = {item["id"]: item["verdict"] for item in json.loads(path.read_text("utf-8"))}
    except OSError as error:
        raise ClaimError(f"cannot read {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ClaimError(f"{path}:{error.lineno}: {error.msg}") from error
    except (KeyError, TypeError) as error:
        raise ClaimError(f"{path} is no ledger of verdicts") from error
    before = ((row, committed.get(row.claim.id, "not in the ledger")) for row in rows)
    return [f"{row.claim.id}: {old} -> {row.verdict}" for row, old in before if old != row.verdict]


def _item(row: LedgerRow) -> dict[str, Any]:
    return {
        "id": row.claim.id,
        "statement": row.claim.statement,
        "verdict": row.verdict,
        "measured": [_number(one) for one in row.measured],
        "setting": row.setting,
        "runs": list(row.runs),
        "command": row.claim.command or f"none: {row.claim.no_command}",
    }


def _number(one: Measured) -> dict[str, Any]:
    values = {"value": one.value, "low": one.low, "high": one.high, "work_bound": one.bound}
    return {
        "quantity": one.quantity,
        **{
            name: float(f"{value:.{_DIGITS}g}")
            for name, value in values.items()
            if value is not None and not math.isnan(value)
        },
    }
