"""Errors of this package; their message is one line meant for the person at the terminal."""


class ResultsError(ValueError):
    """Base of everything this package refuses; the command line turns it into exit code 2."""


class RecordError(ResultsError):
    """A run directory cannot be read or written, or a row in it is not a record."""


class TableError(ResultsError):
    """A table does not exist, or the runs given to it cannot share one."""


class ClaimError(ResultsError):
    """The claim ledger is incomplete or malformed, or a verdict has no record behind it."""
