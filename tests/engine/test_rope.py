from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvcmas.engine.contract import Fill, Plan
from kvcmas.engine.executor import Executor
from kvcmas.engine.rope import Rope
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.errors import UserError
from tests.workflows import random_ids

HEAD_DIM = 64
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, own factor": {
        "rope_type": "yarn",
        "factor": 16.0,
        "attention_factor": 1.5,
        "original_max_position_embeddings": 4096,
    },
}
OFFSETS = [0, 1, 63, 1024, 8191, 40_000]
# Rotations in fp32: two roundings of products near 4, whatever the offset.
FP32 = 2e-6
# Unit roundoff of bf16.
BF16 = 2.0**-8


def config(**parameters: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=131_072,
        rope_parameters={"rope_theta": 500_000.0, **parameters},
    )


def random(tokens: int = 50, seed: int = 0) -> Tensor:
    return torch.randn(3, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def rotated(rope: Rope, x: Tensor, positions: Tensor) -> Tensor:
    """Pairs as complex numbers in fp64, with the attention factor: the definition."""
    first, second = x.double().chunk(2, dim=-1)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None] * rope.inv_freq)
    z = torch.complex(first, second) * turn * rope.attention_scaling
    return torch.cat((z.real, z.imag), dim=-1)


def norms(x: Tensor) -> Tensor:
    """Norm of each rotated pair, at both of its places."""
    first, second = x.double().chunk(2, dim=-1)
    return torch.hypot(first, second).repeat(1, 1, 2)


@pytest.fixture(params=TYPES)
def rope(request: pytest.FixtureRequest) -> Rope:
    return Rope.from_config(config(**TYPES[request.param]))


@pytest.mark.parametrize("name", TYPES)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    own, theirs = (make(config(**TYPES[name])) for make in (Rope.from_config, LlamaRotaryEmbedding))
    assert torch.equal(own.inv_freq, theirs.inv_freq.double())
    assert own.attention_scaling == theirs.attention_scaling


def test_only_yarn_scales_and_scaling_changes_the_frequencies() -> None:
    ropes = {name: Rope.from_config(config(**TYPES[name])) for name in TYPES}
    scaled = {name for name, rope in ropes.items() if rope.attention_scaling != 1}
    assert scaled == {"yarn", "yarn, own factor"}
    default = ropes["default"].inv_freq
    assert not any(torch.equal(r.inv_freq, default) for n, r in ropes.items() if n != "default")


def test_head_dim_follows_from_the_width_where_the_config_names_none() -> None:
    qwen2 = Qwen2Config(
        hidden_size=256,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    assert Rope.from_config(qwen2).inv_freq.shape == (32,)


@pytest.mark.parametrize("name", TYPES)
def test_fresh_keys_are_those_of_transformers(name: str) -> None:
    """At small positions, where Transformers' fp32 angles are accurate."""
    x, positions = random(), torch.arange(50)
    theirs = LlamaRotaryEmbedding(config(**TYPES[name]))
    cos, sin = theirs(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin)
    own = Rope.from_config(config(**TYPES[name])).make(x, positions)
    torch.testing.assert_close(own, expected[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("start", OFFSETS)
def test_fresh_keys_do_not_drift_with_the_position(rope: Rope, start: int) -> None:
    x, positions = random(), torch.arange(start, start + 50)
    error = (rope.make(x, positions) - rotated(rope, x, positions)).abs().max()
    assert float(error) < FP32


def test_positions_may_be_scattered_and_come_in_any_order(rope: Rope) -> None:
    x, positions = random(4), torch.tensor([9, 0, 700, 3])
    expected = torch.cat([rope.make(x[:, i : i + 1], positions[i : i + 1]) for i in range(4)], 1)
    assert torch.equal(rope.make(x, positions), expected)
    assert rope.make(x[:, :0], positions[:0]).shape == (3, 0, HEAD_DIM)


def test_what_is_kept_for_one_tensor_of_positions_is_not_given_to_another(rope: Rope) -> None:
    x, here, there = torch.randn(2, 3, HEAD_DIM), torch.arange(3), torch.arange(3) + 7
    fresh = Rope(rope.inv_freq, rope.attention_scaling)
    for positions in (here, here, there, there.clone(), here):
        assert torch.equal(rope.make(x, positions), fresh.make(x, positions.clone()))


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("start", [0, 5, 40_000])
def test_align_equals_fresh_rotation_at_the_target(rope: Rope, start: int, offset: int) -> None:
    """The bound is the same at every offset: phases are not formed in low precision."""
    x, steps = random(), torch.arange(50)
    keys = rope.make(x, start + steps)
    forward = rope.align(keys, offset) - rotated(rope, x, start + offset + steps)
    assert float(forward.abs().max()) < 2 * FP32
    backward = rope.align(rope.make(x, start + offset + steps), -offset) - keys
    assert float(backward.abs().max()) < 2 * FP32


@pytest.mark.parametrize("offset", OFFSETS)
def test_there_and_back_is_the_identity(rope: Rope, offset: int) -> None:
    x = random()
    error = (rope.align(rope.align(x, offset), -offset) - x).abs().max()
    assert float(error) < FP32


@given(st.integers(-40_000, 40_000), st.integers(-40_000, 40_000), st.sampled_from(sorted(TYPES)))
def test_rotations_compose(a: int, b: int, name: str) -> None:
    rope, x = Rope.from_config(config(**TYPES[name])), random(8)
    error = (rope.align(rope.align(x, a), b) - rope.align(x, a + b)).abs().max()
    assert float(error) < FP32


@given(st.integers(-40_000, 40_000), st.sampled_from(sorted(TYPES)))
def test_moving_a_key_never_scales_it(offset: int, name: str) -> None:
    """YaRN's factor belongs to a key once, when it is made."""
    rope, x = Rope.from_config(config(**TYPES[name])), random(8)
    torch.testing.assert_close(norms(rope.align(x, offset)), norms(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("offset", OFFSETS)
def test_bf16_is_as_good_as_its_roundings(rope: Rope, offset: int) -> None:
    """A rotation in fp32 keeps the keys' rounding; the result is rounded once more."""
    x, steps = random(), torch.arange(50)
    keys, exact = rope.make(x, steps).bfloat16(), rotated(rope, x, steps)
    moved, target = rope.align(keys, offset), rotated(rope, x, offset + steps)
    assert moved.dtype == torch.bfloat16
    pairs = norms(exact) * BF16
    assert bool(((moved.double() - target).abs() <= 2.5 * pairs).all())
    back = rope.align(moved, -offset)
    assert bool(((back.double() - keys.double()).abs() <= 2.5 * pairs).all())


def test_align_in_place_equals_align_and_zero_changes_nothing(rope: Rope) -> None:
    x = random()
    for offset in (-7, 0, 33):
        moved = x.clone()
        assert rope.align_(moved, offset) is moved
        assert torch.equal(moved, rope.align(x, offset))
    assert torch.equal(rope.align(x, 0), x)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0] * 32,
            "long_factor": [2.0] * 32,
            "original_max_position_embeddings": 4096,
        },
    ],
    ids=lambda p: p["rope_type"],
)
def test_length_dependent_types_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=parameters["rope_type"]):
        Rope.from_config(config(**parameters))


def test_an_unknown_type_is_refused() -> None:
    unknown = config(**TYPES["default"])
    unknown.rope_parameters = {"rope_type": "spiral", "rope_theta": 10_000.0}
    with pytest.raises(UserError, match="'spiral' cannot be re-aligned; supported: default"):
        Rope.from_config(unknown)


def test_partial_rotary_is_refused() -> None:
    with pytest.raises(UserError, match="partial rotary"):
        Rope.from_config(config(rope_type="default", partial_rotary_factor=0.5))


@pytest.mark.parametrize("system", [0, 3, 700])
def test_layer_0_survives_extraction_and_re_alignment(executor: Executor, system: int) -> None:
    """Layer 0 depends on token and position only, so a reused segment is exact there."""
    q, run = random_ids(1, 20), executor.run
    source = Prompt((pf(random_ids(2, 250)), ph("q", q), pf(random_ids(3, 4))))
    cache = run(source, Plan.make(source)).buffer.extract(source.rows(1))
    target = Prompt((pf(random_ids(4, system)), ph("q", q), pf(random_ids(5, 6))))
    reused = run(target, Plan.make(target, (Fill(1, cache),))).buffer
    dense = run(target, Plan.make(target)).buffer
    torch.testing.assert_close(reused.k[0], dense.k[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(reused.v[0], dense.v[0], atol=1e-5, rtol=0)
    # Deeper layers saw another context.
    assert float((reused.v[1] - dense.v[1]).abs().max()) > 1e-2


def test_canonical_keys_start_at_zero(executor: Executor) -> None:
    """Extracting the first segment changes no bit; a later one equals itself placed first."""
    prompt = Prompt((pf(random_ids(1, 9)), ph("q", random_ids(2, 6)), pf([5])))
    buffer = executor.run(prompt, Plan.make(prompt)).buffer
    assert torch.equal(buffer.extract(prompt.rows(0)).k, buffer.k[:, :, :9])
    alone = Prompt((ph("q", random_ids(2, 6)),))
    expected = executor.run(alone, Plan.make(alone)).buffer.k[0]
    torch.testing.assert_close(buffer.extract(prompt.rows(1)).k[0], expected, atol=1e-5, rtol=0)
