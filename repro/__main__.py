"""``python -m repro``."""

from repro.cli import main

main()
