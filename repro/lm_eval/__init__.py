"""The multi-agent workflow as a model of EleutherAI's lm-evaluation-harness.

Importing :mod:`repro.lm_eval.model` registers the model ``kvcmas-workflow``. lm-eval finds no
packages by itself, so its own command line is reached as ``python -m repro.lm_eval``, which takes
lm-eval's arguments; ``repro lm-eval`` is the short way.
"""
