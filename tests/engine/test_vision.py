"""Images and videos as rows: against Transformers' own forward, and as shared segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessorPil,
    Qwen2Config,
    SiglipVisionConfig,
)

from baselines.fullshared import FullShared
from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.contract import Enter, Method, Plan
from kvcmas.engine.executor import Executor
from kvcmas.engine.inputs import InputRows
from kvcmas.engine.segments import Prompt, Segment, Visual, ids_sha256, pf, ph
from kvcmas.engine.session import Engine, Session
from kvcmas.engine.vision import Picture, Pixels, VisualEncoder, most_rows
from kvcmas.engine.workflow import QUERY, sequential
from kvcmas.errors import UserError
from repro.models import load_image_processor, resolve

if TYPE_CHECKING:
    from conftest import Loaded

CLOSE = 1e-4  # fp32 logits of order 1
WORDS = (70, 71, 72, 73)
SIZES = [(56, 56), (100, 200), (300, 90), (720, 1514), (20, 200), (1, 1)]


@pytest.fixture(scope="module")
def llava(tiny_llava: Loaded) -> LlavaOnevisionForConditionalGeneration:
    return tiny_llava[0]


@pytest.fixture(scope="module")
def processor() -> LlavaOnevisionImageProcessorPil:
    return load_image_processor(resolve("tiny-llava-onevision"))


@pytest.fixture(scope="module")
def encoder(
    llava: LlavaOnevisionForConditionalGeneration, processor: LlavaOnevisionImageProcessorPil
) -> VisualEncoder:
    return VisualEncoder(llava, processor)


@pytest.fixture(scope="module")
def adapter(llava: LlavaOnevisionForConditionalGeneration) -> TransformersAdapter:
    return TransformersAdapter(llava)


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def prompt_with(picture: Picture, system: Sequence[int] = (5, 6, 7)) -> Prompt:
    shared = ph(QUERY, (*picture.ids, *WORDS), (picture.at(0),))
    return Prompt((pf(tuple(system)), shared, pf((9, 8))))


def dense(adapter: TransformersAdapter, prompt: Prompt) -> torch.Tensor:
    return Executor(adapter).run(prompt, Plan.make(prompt), all_logits=True).logits


# Against Transformers


@pytest.mark.parametrize("size", SIZES)
def test_images_of_any_size_are_transformers_own(
    llava: LlavaOnevisionForConditionalGeneration,
    processor: LlavaOnevisionImageProcessorPil,
    encoder: VisualEncoder,
    adapter: TransformersAdapter,
    size: tuple[int, int],
) -> None:
    """Transformers refuses a wrong number of placeholders, so the row count is checked as well."""
    pixels = noise(*size)
    prompt = prompt_with(encoder.image(pixels))
    made = processor(Image.fromarray(pixels), return_tensors="pt")
    expected = llava(
        input_ids=torch.tensor([prompt.ids]),
        pixel_values=made["pixel_values"],
        image_sizes=made["image_sizes"],
    ).logits[0]
    assert (dense(adapter, prompt) - expected).abs().max() < CLOSE
    blind = llava(input_ids=torch.tensor([prompt.ids])).logits[0]
    assert (blind - expected).abs().max() > 0.1


@pytest.mark.parametrize("count", [1, 2, 32])
def test_videos_are_transformers_own(
    llava: LlavaOnevisionForConditionalGeneration,
    encoder: VisualEncoder,
    adapter: TransformersAdapter,
    count: int,
) -> None:
    """Frames prepared here by hand: PIL's bicubic squares, scaled to [-1, 1]."""
    frames = [noise(70, 90, seed) for seed in range(count)]
    prompt = prompt_with(encoder.video(frames))
    squares = [Image.fromarray(f).resize((56, 56), Image.Resampling.BICUBIC) for f in frames]
    values = np.stack([np.asarray(s, dtype=np.float32) / 127.5 - 1 for s in squares])
    expected = llava(
        input_ids=torch.tensor([prompt.ids]),
        pixel_values_videos=torch.from_numpy(values).permute(0, 3, 1, 2)[None],
    ).logits[0]
    assert (dense(adapter, prompt) - expected).abs().max() < CLOSE


def test_rows_follow_the_shape_of_the_image(encoder: VisualEncoder) -> None:
    rows = {size: len(encoder.image(noise(*size)).features) for size in SIZES}
    assert rows[56, 56] == 16 + 4 * 5  # the base view, one tile with a line end per row
    assert rows[100, 200] > rows[300, 90] > rows[56, 56]
    assert len(encoder.video([noise(30, 30)] * 32).features) == 32 * 4 + 1


def test_most_rows_is_a_bound_for_images_and_exact_for_videos(
    llava: LlavaOnevisionForConditionalGeneration, encoder: VisualEncoder
) -> None:
    most = most_rows(llava.config, None)
    assert max(len(encoder.image(noise(*size)).features) for size in (*SIZES, (224, 224))) <= most
    assert most < 1.3 * len(encoder.image(noise(224, 224)).features)
    assert most_rows(llava.config, 5) == len(encoder.video([noise(9, 9)] * 5).features)


def test_the_papers_video_has_196_rows_a_frame() -> None:
    """384 x 384 pixels in patches of 14, pooled two by two; here in a narrow model."""
    config = LlavaOnevisionConfig(
        text_config=Qwen2Config(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            vocab_size=16,
        ),
        vision_config=SiglipVisionConfig(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            image_size=384,
            patch_size=14,
            vision_use_head=False,
        ),
        image_token_index=14,
        video_token_index=15,
    )
    model = LlavaOnevisionForConditionalGeneration(config).eval()
    encoder = VisualEncoder(model, LlavaOnevisionImageProcessorPil())
    picture = encoder.video([noise(90, 160, seed) for seed in range(32)])
    assert len(picture.features) == 32 * 196 + 1  # Transformers closes a video with one row
    assert set(picture.ids) == {15}
    assert set(encoder.image(noise(384, 384)).ids) == {14}


def test_what_the_encoder_refuses(
    tiny_llama: Loaded, processor: LlavaOnevisionImageProcessorPil, encoder: VisualEncoder
) -> None:
    with pytest.raises(UserError, match="'llama' takes no images"):
        VisualEncoder(tiny_llama[0], processor)
    with pytest.raises(ValueError, match="at least one frame"):
        encoder.video([])
    for shape in ((10, 10, 4), (10, 10), (0, 10, 3)):
        with pytest.raises(ValueError, match=r"\[height, width, 3\]"):
            encoder.image(np.zeros(shape, dtype=np.uint8))
    assert encoder.processor == "LlavaOnevisionImageProcessorPil"


# Identity


def test_the_hash_of_a_prompt_covers_the_pixels(encoder: VisualEncoder) -> None:
    pixels = noise(60, 60)
    other = pixels.copy()
    other[30, 30] ^= 255
    first, same, changed = (prompt_with(encoder.image(p)) for p in (pixels, pixels.copy(), other))
    assert first.ids == changed.ids
    assert first.sha256 == same.sha256 != changed.sha256
    assert first.sha256 != ids_sha256(first.ids)  # an image is not its placeholders


def test_the_hash_does_not_depend_on_the_segmentation() -> None:
    image = Visual(0, torch.zeros(2, 4), "a" * 64)
    joined = Prompt((ph("q", (1, 9, 9, 2), (Visual(1, image.features, image.sha256),)),))
    split = Prompt((pf((1,)), ph("q", (9, 9, 2), (image,))))
    moved = Prompt((pf((1,)), ph("q", (9, 9, 2), (Visual(1, image.features, image.sha256),))))
    assert joined.sha256 == split.sha256 != moved.sha256
    assert Prompt((pf((1, 2)),)).sha256 == ids_sha256((1, 2))


def test_visuals_must_fit_their_segment() -> None:
    features = torch.zeros(2, 4)
    for starts in ((3,), (0, 1), (-1,), (2, 0)):
        visuals = tuple(Visual(start, features, "a" * 64) for start in starts)
        with pytest.raises(ValueError, match="overlap or leave"):
            Segment("PH", (1, 2, 3, 4), "q", visuals)
    assert Visual(0, features, "a") == Visual(0, features + 1, "a") != Visual(0, features, "b")


# As rows


def test_rows_are_asked_for_in_any_order(
    encoder: VisualEncoder, adapter: TransformersAdapter
) -> None:
    picture = encoder.image(noise(56, 56))
    inputs = InputRows(adapter, prompt_with(picture))
    rows = torch.tensor([41, 3, 0, 20, 38, 39])
    hidden = inputs(rows)
    assert torch.equal(hidden[[1, 3, 4]], picture.features[[0, 17, 35]])
    assert torch.equal(hidden[[0, 2, 5]], adapter.embed(torch.tensor([72, 5, 70])))
    table = adapter.embed(torch.tensor([picture.token]))
    assert not torch.allclose(hidden[1], table[0])


def session_of(adapter: TransformersAdapter, method: Method, prefix: Sequence[int] = ()) -> Session:
    return Engine(adapter, method, reference_prefix=prefix).session(sequential(2), "r")


def test_a_reused_image_is_not_executed_and_matters(
    encoder: VisualEncoder, adapter: TransformersAdapter
) -> None:
    picture = encoder.image(noise(100, 200))
    results = {}
    for method in (NonShared(), FullShared()):
        session = session_of(adapter, method)
        first, second = session.workflow.nodes
        session.run(first, prompt_with(picture), max_new_tokens=2)
        prompt = prompt_with(picture, system=(20, 21, 22, 23, 24, 25))
        results[method.name] = session.run(second, prompt, max_new_tokens=2, keep_buffer=True)
    exact, shared = results["nonshared"], results["fullshared"]
    entries = shared.accounting.shared[1]
    assert (entries.executed, entries.reused) == (0, adapter.spec.layers * (152 + len(WORDS)))
    assert exact.prompt.sha256 == shared.prompt.sha256
    assert exact.buffer is not None and shared.buffer is not None
    rows = slice(0, len(shared.prompt))
    difference = exact.buffer.k[:, :, rows] - shared.buffer.k[:, :, rows]
    errors = difference.abs().amax(dim=(1, 2, 3))
    assert errors[0] < CLOSE < errors[1]  # layer 0 knows token and position only
    assert (exact.first_logits - shared.first_logits).abs().max() > 1e-3


def test_another_picture_in_the_same_slot_is_refused(
    encoder: VisualEncoder, adapter: TransformersAdapter
) -> None:
    session = session_of(adapter, FullShared())
    first, second = session.workflow.nodes
    session.run(first, prompt_with(encoder.image(noise(56, 56))), max_new_tokens=1)
    with pytest.raises(ValueError, match="slot q holds other tokens"):
        session.run(second, prompt_with(encoder.image(noise(56, 56, 1))), max_new_tokens=1)


def test_a_reference_sees_the_picture(encoder: VisualEncoder, adapter: TransformersAdapter) -> None:
    picture = encoder.image(noise(56, 56))
    shared = prompt_with(picture).segments[1]
    session = session_of(adapter, FullShared(), prefix=(2,))
    cache, tokens = session.reference(QUERY, shared.ids, shared.visuals)
    alone = Prompt((pf((2,)), shared))
    expected = Executor(adapter).run(alone, Plan.make(alone)).buffer.extract(alone.rows(1))
    assert tokens == len(alone)
    assert (cache.v - expected.v).abs().max() < CLOSE


def test_rows_of_a_picture_may_enter_in_parts(
    encoder: VisualEncoder, adapter: TransformersAdapter
) -> None:
    """Selective methods execute some of a picture's rows; the order of events changes nothing."""
    prompt = prompt_with(encoder.image(noise(56, 56)))
    rows = torch.arange(len(prompt))
    parts = Plan((), (Enter(0, rows[10:]), Enter(0, rows[:10])), ())
    executor = Executor(adapter)
    whole = executor.run(prompt, Plan.make(prompt)).logits
    assert (executor.run(prompt, parts).logits - whole).abs().max() < CLOSE
