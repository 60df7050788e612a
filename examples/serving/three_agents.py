"""Three agents on one `vllm serve`, each reading the question and all answers before it.

The agents talk to vLLM's OpenAI endpoint. What the plug-in needs beside the prompt's token ids goes
into `kv_transfer_params`: which runs of the ids are shared, and whose turn it is. Start the server
as docs/serving.md says, then:

    python examples/serving/three_agents.py MODEL_DIRECTORY --url http://localhost:8000/v1
"""

from __future__ import annotations

import argparse
import uuid
from dataclasses import dataclass

from openai import OpenAI
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvcmas.engine.segments import Prompt, Segment, pf, ph
from kvcmas.engine.workflow import QUERY, Node, Workflow, fully_connected
from kvcmas.serving.params import KEY, TurnParams

ROLES = (
    "You plan. List the steps that answer the question.",
    "You carry out the plan and give a first answer.",
    "You check the first answer and give the final one.",
)


@dataclass(frozen=True)
class Answer:
    """One agent's turn: its text, and how many prompt rows the plug-in wrote for it."""

    agent: str
    text: str
    prompt_tokens: int
    external_rows: int


def ask(
    client: OpenAI,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    max_tokens: int = 64,
) -> list[Answer]:
    """Run the workflow once. The shared ids are the same for every agent, never re-tokenised."""
    workflow = fully_connected(len(ROLES))
    request = uuid.uuid4().hex
    shared = {QUERY: tokenizer.encode(question, add_special_tokens=False)}
    answers = []
    for node in workflow.nodes:
        prompt = build_prompt(tokenizer, workflow, node, shared)
        params = TurnParams.of(workflow, node, request, prompt)
        response = client.completions.create(
            model=model,
            prompt=prompt.ids,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={
                "kv_transfer_params": params.to_kv_transfer_params(),
                "return_token_ids": True,
            },
        )
        (choice,) = response.choices
        ids = list(choice.token_ids)
        if choice.finish_reason == "stop":
            ids.pop()  # the stop token is no part of what the next agents read
        shared[node.out_slot] = ids
        served = response.kv_transfer_params[KEY]
        if "fallback" in served:
            raise SystemExit(f"{node.name} ran on plain vLLM: {served['fallback']}")
        answers.append(Answer(node.name, choice.text, len(prompt), served["external_rows"]))
    return answers


def build_prompt(
    tokenizer: PreTrainedTokenizerBase,
    workflow: Workflow,
    node: Node,
    shared: dict[str, list[int]],
) -> Prompt:
    """The agent's role, then everything it reads, each with a heading of its own."""

    def text(words: str) -> Segment:
        return pf(tokenizer.encode(words, add_special_tokens=False))

    segments = [text(f"{ROLES[node.agent]}\n\nQuestion: ")]
    for slot in workflow.consumes(node):
        if slot in shared:
            segments += [ph(slot, shared[slot]), text("\n\nNext, from your colleagues: ")]
    segments[-1] = text("\n\nYour answer: ")
    return Prompt(tuple(segments))


def main() -> None:
    """Ask one question and show what came back."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the directory that vLLM serves")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--question", default="How many minutes are there in three days?")
    options = parser.parse_args()
    client = OpenAI(base_url=options.url, api_key="none")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for answer in ask(client, options.model, tokenizer, options.question):
        print(f"{answer.agent}: {answer.external_rows} of {answer.prompt_tokens} prompt rows")
        print(f"    {answer.text.strip()}")


if __name__ == "__main__":
    main()
