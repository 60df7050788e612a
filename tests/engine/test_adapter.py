from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
)

from kvcmas.engine import adapter
from kvcmas.engine.adapter import TransformersAdapter, linear
from kvcmas.engine.contract import Fill, Plan
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.errors import UserError
from tests.workflows import random_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
VISION = SiglipVisionConfig(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """Weights, norms and biases all large enough to show when left out."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.data.normal_(mean, 0.2, generator=generator)
    return model.eval().requires_grad_(False)


def llama(**changes: Any) -> PreTrainedModel:
    return randomised(LlamaForCausalLM(LlamaConfig(**SMALL | changes)))


def qwen2(**changes: Any) -> PreTrainedModel:
    return randomised(Qwen2ForCausalLM(Qwen2Config(**SMALL | changes)))


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


MODELS = {
    "llama": llama,
    "biases everywhere": lambda: llama(attention_bias=True, mlp_bias=True),
    "one kv head": lambda: llama(num_key_value_heads=1),
    "a kv head per head": lambda: llama(num_key_value_heads=4),
    "wide heads": lambda: llama(head_dim=32),
    "tied embeddings": lambda: llama(tie_word_embeddings=True),
    "another norm": lambda: llama(rms_norm_eps=1e-2),
    "linear": lambda: llama(**rope(rope_type="linear", factor=4.0)),
    "yarn": lambda: llama(
        **rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=32)
    ),
    "qwen2": qwen2,
    "qwen2, tied": lambda: qwen2(tie_word_embeddings=True),
}


@torch.inference_mode()
def forward(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0]


PROMPT = Prompt((pf(random_ids(1, 30)), ph("q", random_ids(2, 25)), pf(random_ids(3, 10))))


def reused(executor: Executor) -> Plan:
    """The PH of ``PROMPT`` as it is at another position under nothing: exact at layer 0 only."""
    alone = Prompt((PROMPT.segments[1], pf([9])))
    cache = executor.run(alone, Plan.make(alone)).buffer.extract(alone.rows(0))
    return Plan.make(PROMPT, (Fill(1, cache),))


@pytest.mark.parametrize("name", MODELS)
def test_variants_equal_transformers(name: str) -> None:
    model = MODELS[name]()
    executor = Executor(TransformersAdapter(model))
    run = executor.run(PROMPT, Plan.make(PROMPT), all_logits=True)
    expected = forward(model, PROMPT.ids)
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(run.logits, expected, atol=1e-4, rtol=0)
    aligned = executor.run(PROMPT, reused(executor)).buffer.k[0]
    torch.testing.assert_close(aligned, run.buffer.k[0], atol=1e-5, rtol=1e-5)


def test_language_trunk_of_llava_onevision() -> None:
    config = LlavaOnevisionConfig(vision_config=VISION, text_config=Qwen2Config(**SMALL))
    model = randomised(LlavaOnevisionForConditionalGeneration(config))
    run = Executor(TransformersAdapter(model)).run(PROMPT, Plan.make(PROMPT), all_logits=True)
    torch.testing.assert_close(run.logits, forward(model, PROMPT.ids), atol=1e-4, rtol=0)


def test_spec_describes_the_model(hf: PreTrainedModel) -> None:
    spec, config = TransformersAdapter(hf).spec, hf.config
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (4, 8, 2, 32)
    assert (spec.hidden, spec.ffn) == (config.hidden_size, config.intermediate_size)
    assert (spec.vocab, spec.max_positions) == (config.vocab_size, config.max_position_embeddings)
    assert (spec.dtype, spec.device) == (torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        layers = hf(torch.tensor([PROMPT.ids]), use_cache=True).past_key_values.layers
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert spec.kv_bytes_per_token * len(PROMPT) == nbytes


def test_no_rows_are_no_problem(model: TransformersAdapter) -> None:
    none = torch.empty(0, model.spec.hidden)
    assert model.embed(torch.empty(0, dtype=torch.long)).shape == none.shape
    assert model.project_q(0, none).shape == (8, 0, 32)
    assert [x.shape for x in model.project_kv(0, none)] == [(2, 0, 32)] * 2
    assert model.finish(0, none, torch.empty(8, 0, 32)).shape == none.shape


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("features", "rows"), [(24, 1), (7, 1), (24, 2), (24, 0)])
def test_a_product_of_one_row_is_that_of_the_module(
    features: int, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "on_amd", lambda: True)
    torch.manual_seed(0)
    module = torch.nn.Linear(32, features, bias=bias)
    x = torch.randn(rows, 32)
    torch.testing.assert_close(linear(module, x), module(x), atol=1e-6, rtol=1e-5)


def test_a_product_of_one_row_is_batched_on_amd_only(monkeypatch: pytest.MonkeyPatch) -> None:
    batched: list[torch.Size] = []

    def bmm(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        batched.append(one.shape)
        return one @ other

    monkeypatch.setattr(torch, "bmm", bmm)
    module, x = torch.nn.Linear(32, 24), torch.randn(1, 32)
    for amd in (False, True):
        monkeypatch.setattr(adapter, "on_amd", lambda amd=amd: amd)
        linear(module, x)
    assert batched == [torch.Size([8, 3, 32])]


def test_a_product_of_one_row_leaves_other_modules_to_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter, "on_amd", lambda: True)

    class Doubled(torch.nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(rows)

    x = torch.randn(1, 32)
    doubled, half = Doubled(32, 8), torch.nn.Linear(32, 8, dtype=torch.bfloat16)
    assert torch.equal(linear(doubled, x), doubled(x))
    assert torch.equal(linear(half, x.bfloat16()), half(x.bfloat16()))


def test_nothing_of_the_model_is_changed(hf: PreTrainedModel) -> None:
    before = {name: value.clone() for name, value in hf.state_dict().items()}
    modules = [(name, type(module), module.forward) for name, module in hf.named_modules()]
    executor = Executor(TransformersAdapter(hf))
    executor.run(PROMPT, reused(executor))
    assert all(torch.equal(value, before[name]) for name, value in hf.state_dict().items())
    assert [(name, type(m), m.forward) for name, m in hf.named_modules()] == modules


def test_unknown_architectures_are_refused() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=10))
    mistral = MistralForCausalLM(MistralConfig(**SMALL))
    for model in (gpt2, mistral):
        with pytest.raises(UserError, match=r"'(gpt2|mistral)' is not supported; known: llama, q"):
            TransformersAdapter(model)


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(UserError, match="sliding"):
        TransformersAdapter(qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1))


def test_rope_types_that_cannot_be_aligned_are_refused() -> None:
    with pytest.raises(UserError, match="dynamic"):
        TransformersAdapter(llama(**rope(rope_type="dynamic", factor=2.0)))
