"""lm-eval's own command line with the model ``kvcmas-workflow`` in its registry."""

from lm_eval.__main__ import cli_evaluate

import repro.lm_eval.model  # noqa: F401 - registers the model

if __name__ == "__main__":
    cli_evaluate()
