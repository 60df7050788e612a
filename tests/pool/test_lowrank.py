import pytest
import torch
from torch import Tensor

from kvcmas.pool.lowrank import (
    BLOCK,
    Factorisation,
    Factors,
    factorise,
    flat,
    prefix_distances,
    token_distances,
    weighted_sum,
)

LAYERS, HEADS, DIM = 2, 2, 8
D = HEADS * DIM


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rank_of(tokens: int, width: int, rank: int, seed: int = 0) -> Tensor:
    return random(LAYERS, tokens, rank, seed=seed) @ random(LAYERS, rank, width, seed=seed + 1)


def rebuilt(factors: Factors) -> Tensor:
    return torch.stack([factors.matrix(layer) for layer in range(len(factors.a))])


def unflat(z: Tensor) -> Tensor:
    return z.unflatten(-1, (HEADS, DIM)).transpose(-3, -2)


def decaying(tokens: int, width: int) -> Tensor:
    """Singular values over eight orders of magnitude, as keys of a real model have them."""
    z = random(LAYERS, tokens, width)
    u, s, v = torch.linalg.svd(z.double(), full_matrices=False)
    s = torch.logspace(3, -5, s.shape[-1], dtype=torch.float64).expand_as(s)
    return (u @ (s[..., None] * v)).float()


MATRICES = {
    "tall": random(LAYERS, 60, D),
    "wide": random(LAYERS, 5, D),
    "square": random(LAYERS, D, D),
    "one token": random(LAYERS, 1, D),
    "rank-deficient tall": rank_of(60, D, 3),
    "rank-deficient wide": rank_of(10, D, 3),
    "zero": torch.zeros(LAYERS, 30, D),
    "zero wide": torch.zeros(LAYERS, 4, D),
    "decaying": decaying(80, D),
    "decaying wide": decaying(12, D),
    "large": 1e4 * random(LAYERS, 60, D),
    "tiny": 1e-6 * random(LAYERS, 60, D),
}


@pytest.mark.parametrize("rank", [1, 4, 12, None])
@pytest.mark.parametrize("name", MATRICES)
def test_exact_factorisation_is_as_good_as_the_svd(name: str, rank: int | None) -> None:
    z = MATRICES[name]
    factors = factorise(z, rank)
    s = torch.linalg.svdvals(z.double())
    best = s[:, factors.b.shape[1] :].square().sum(1).sqrt()
    error = (rebuilt(factors).double() - z.double()).norm(dim=(1, 2))
    norm = z.double().norm(dim=(1, 2))
    assert bool((error <= best + 1e-4 * norm).all())


@pytest.mark.parametrize("tokens", [9, D, 70])
def test_exact_reconstruction_equals_the_truncated_svd(tokens: int) -> None:
    z = decaying(tokens, D)
    u, s, v = torch.linalg.svd(z.double(), full_matrices=False)
    expected = (u[..., :4] * s[:, None, :4]) @ v[:, :4]
    difference = (rebuilt(factorise(z, 4)).double() - expected).norm()
    assert difference <= 1e-4 * expected.norm()


@pytest.mark.parametrize("method", ["exact", "randomised"])
@pytest.mark.parametrize(
    ("tokens", "rank", "effective"), [(60, 4, 4), (60, 99, D), (60, None, D), (3, 4, 3), (1, 4, 1)]
)
def test_effective_rank(
    tokens: int, rank: int | None, effective: int, method: Factorisation
) -> None:
    generator = torch.Generator().manual_seed(0)
    factors = factorise(random(LAYERS, tokens, D), rank, method, generator)
    assert factors.a.shape == (LAYERS, tokens, effective)
    assert factors.b.shape == (LAYERS, effective, D)


@pytest.mark.parametrize("method", ["exact", "randomised"])
@pytest.mark.parametrize("name", MATRICES)
def test_rows_of_b_are_orthonormal(name: str, method: Factorisation) -> None:
    generator = torch.Generator().manual_seed(0)
    b = factorise(MATRICES[name], 4, method, generator).b
    torch.testing.assert_close(b @ b.mT, torch.eye(b.shape[1]).expand_as(b @ b.mT))


def test_randomised_factorisation_is_seeded_and_leaves_the_global_generator_alone() -> None:
    z, before = decaying(80, D), torch.get_rng_state()
    first, again, other = (
        factorise(z, 4, "randomised", torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.a, again.a)
    assert torch.equal(first.b, again.b)
    assert not torch.equal(first.b, other.b)
    exact = (rebuilt(factorise(z, 4)) - z).norm()
    assert (rebuilt(first) - z).norm() <= 1.01 * exact


def test_factors_keep_the_dtype() -> None:
    factors = factorise(random(LAYERS, 30, D).bfloat16(), 4)
    assert (factors.a.dtype, factors.b.dtype) == (torch.bfloat16, torch.bfloat16)
    assert factors.nbytes == 2 * LAYERS * 4 * (30 + D)


def test_flat_puts_heads_side_by_side() -> None:
    kv = random(LAYERS, HEADS, 5, DIM)
    assert torch.equal(flat(kv)[1, 3], torch.cat((kv[1, 0, 3], kv[1, 1, 3])))
    assert torch.equal(unflat(flat(kv)), kv)


def bases(dtype: torch.dtype, *lengths: int) -> list[Factors]:
    return [factorise(random(LAYERS, n, D, seed=i + 1).to(dtype), 4) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 20, BLOCK + 30])
def test_gate_distance_from_factors_equals_that_from_the_reconstruction(
    rows: int, dtype: torch.dtype
) -> None:
    v = random(LAYERS, HEADS, BLOCK + 40, DIM).to(dtype)
    anchors = bases(dtype, BLOCK + 30, BLOCK + 300)
    expected = [
        (flat(v)[:, :rows].double() - rebuilt(base)[:, :rows].double()).norm() for base in anchors
    ]
    got = prefix_distances(v, anchors, rows)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-5, atol=0)


def test_gate_distance_to_itself_is_zero_and_never_nan() -> None:
    v = unflat(100 * rank_of(30, D, 4))
    got = prefix_distances(v, [factorise(flat(v), 4)], 30)
    assert float(got) <= 1e-3 * float(v.norm())


def test_gate_distance_without_bases() -> None:
    assert prefix_distances(random(LAYERS, HEADS, 5, DIM), [], 0).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_distance_is_the_mean_absolute_difference(dtype: torch.dtype) -> None:
    kv = random(LAYERS, HEADS, BLOCK + 40, DIM).to(dtype)
    anchors, rows = bases(dtype, BLOCK + 40, BLOCK + 50), BLOCK + 20
    expected = [
        (flat(kv)[:, :rows].float() - rebuilt(base)[:, :rows]).abs().mean(dim=(0, 2))
        for base in anchors
    ]
    got = token_distances(kv, anchors, rows)
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_a_base_is_infinitely_far_from_tokens_it_does_not_reach() -> None:
    got = token_distances(random(LAYERS, HEADS, 9, DIM), bases(torch.float32, 4, 9), 9)
    assert got[0].isinf().tolist() == [False] * 4 + [True] * 5
    assert not bool(got[1].isinf().any())


def test_weighted_sum_is_that_of_the_reconstructions() -> None:
    deltas, weights = bases(torch.float32, 20, 15), random(2, 18).softmax(dim=0)
    weights[1, 15:] = 0
    full = [torch.nn.functional.pad(rebuilt(d), (0, 0, 0, 5)) for d in deltas]
    for rows in (18, 16, 11):
        blocks = weighted_sum(weights[:, :rows], deltas, 1)
        expected = sum(w[:rows, None] * f[1, :rows] for w, f in zip(weights, full, strict=True))
        torch.testing.assert_close(torch.cat([delta for _, delta in blocks]), expected)
