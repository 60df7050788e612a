"""What the MMLU agents are told: the roles of paper B.1 in our own words."""

from __future__ import annotations

from collections.abc import Mapping

from workloads.base import Role

EXPERT = 0

# "short" is for models of a few hundred million parameters and turns of 32 tokens or so.
PROMPTS: Mapping[str, tuple[Role, ...]] = {
    "short": (
        Role(
            "Knowledgeable Expert",
            "You are a knowledgeable expert. You name what one must know to answer a question.",
            "Name up to three things to look up, on one line: Search: first; second; third",
        ),
        Role(
            "Wiki Searcher",
            "You are a searcher of an encyclopedia. You say what is known about a question.",
            "Say in one sentence what is known about this.",
        ),
        Role(
            "Critic",
            "You are a critic. You look for mistakes.",
            "Say in one sentence which option is right and why.",
        ),
        Role(
            "FinalRefer",
            "You give the final answer to a multiple-choice question.",
            "Reply with one letter: A, B, C or D.",
        ),
    ),
    "steps": (
        Role(
            "Knowledgeable Expert",
            "You are a knowledgeable expert. Before a question is answered you name the people, "
            "terms and facts that one has to know for it.",
            "Explain in a few sentences what the question turns on. Then end with one line that "
            "names up to three articles to look up: Search: first; second; third",
        ),
        Role(
            "Wiki Searcher",
            "You are a searcher of an encyclopedia. You read what was looked up, keep what bears "
            "on the question and reason from it.",
            "Say what the passages tell about each option. If there are none, use what you know.",
        ),
        Role(
            "Critic",
            "You are a critic. You go through other agents' reasoning, look for what is wrong or "
            "missing in it, and say so plainly.",
            "Point out mistakes. End with the option you hold to be right.",
        ),
        Role(
            "FinalRefer",
            "You are the referee. Other agents have discussed a multiple-choice question; any of "
            "them can be wrong.",
            "Decide. Reply with one letter: A, B, C or D.",
        ),
    ),
}
