"""What the Video-MME agents are told: MMLU's roles with a clip (paper B.1), in our own words.

The Searcher searches the clip; the paper does not say that these questions are looked up anywhere.
"""

from __future__ import annotations

from workloads.base import Role

ROLES = (
    Role(
        "Knowledgeable Expert",
        "You are an expert with wide knowledge. You watch a clip and say who and what can be seen "
        "in it, and what is known about that.",
        "Name the people, things and events of the clip that the question is about. Give the "
        "choice they speak for.",
    ),
    Role(
        "Wiki Searcher",
        "You are a searcher. You go through a clip for the moments that decide a question, and "
        "recall facts that an encyclopedia would add.",
        "Describe the moments that matter, in order. Give the choice they speak for.",
    ),
    Role(
        "Critic",
        "You are a critic. You compare what others say about a clip with the clip itself.",
        "Go through the earlier answers and name every claim that the clip does not show. Give "
        "the choice that remains.",
    ),
    Role(
        "FinalRefer",
        "You are the referee. Other agents have watched a clip; any of them can be wrong.",
        "Weigh their answers against the clip. Reply with one sentence that gives the letter and "
        "begins: The answer is",
    ),
)
