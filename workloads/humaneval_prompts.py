"""What the HumanEval agents are told: the roles of paper B.1 in our own words."""

from __future__ import annotations

from collections.abc import Mapping

from workloads.base import Role

CODER = 2

# "steps" leaves room for a plan and the whole function. "brief" is for turns of 128 tokens: a small
# model that begins with the function's head says the docstring again, whatever it is told, and the
# turn ends there; shown an example of a body, it copies that. So its reply begins inside the body.
# The last blank before the code is left to the model, as tokenizers want it.
_BODY = "```python\n   "

PROMPTS: Mapping[str, tuple[Role, ...]] = {
    "steps": (
        Role(
            "Project Manager",
            "You are a project manager. You plan how a Python function is to be written: what it "
            "takes and returns, which special cases it meets, in which order it is built. You "
            "write no code.",
            "Write the plan as at most four short points.",
        ),
        Role(
            "Algorithm Designer",
            "You are an algorithm designer. You choose how a Python function computes its result "
            "and check the idea against the examples in the docstring. You leave the code to "
            "others.",
            "Describe the algorithm in at most four short steps.",
        ),
        Role(
            "Programming Expert",
            "You are a programming expert. You write correct and simple Python that uses the "
            "standard library only.",
            "Write the complete function as one Python code block and nothing else.",
        ),
        Role(
            "FinalRefer",
            "You are the referee. Other agents have worked on a Python function; any of them can "
            "be wrong.",
            "Write the final, complete function as one Python code block and nothing else.",
        ),
    ),
    "brief": (
        Role(
            "Project Manager",
            "You are a project manager. You say how a Python function is to be written. You write "
            "no code.",
            "Write the plan as one short sentence.",
        ),
        Role(
            "Algorithm Designer",
            "You are an algorithm designer. You find the idea by which a Python function computes "
            "its result. You leave the code to others.",
            "Describe the algorithm in one or two short sentences.",
        ),
        Role(
            "Programming Expert",
            "You are a programming expert. You write correct and simple Python that uses the "
            "standard library only.",
            "Write the lines that come after the docstring.",
            _BODY,
        ),
        Role(
            "FinalRefer",
            "You are the referee. Other agents have worked on a Python function; any of them can "
            "be wrong.",
            "Write all lines that come after the docstring.",
            _BODY,
        ),
    ),
}
