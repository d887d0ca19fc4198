"""Padding replaces what is no token and nothing else, and attention reads copies as one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from stillhouse.models.padding import Padding, log_copies
from stillhouse.process import Condition

KINDS = [Padding("zero"), Padding("replicate"), Padding("noisy", beta=0.05)]
EVERY = pytest.mark.parametrize("padding", KINDS, ids=lambda padding: padding.kind)


def prompts(counts: list[int], length: int, width: int = 6, *, junk: float = 0.0) -> Condition:
    """Random tokens, `junk` where there is none."""
    draw = torch.Generator().manual_seed(sum(counts) + length)
    text = torch.randn(len(counts), length, width, generator=draw, dtype=torch.float64)
    mask = torch.arange(length) < torch.tensor(counts)[:, None]
    return Condition(text=text.masked_fill(~mask[..., None], junk), text_mask=mask)


def attention(query: Tensor, tokens: Tensor, bias: Tensor | None = None) -> Tensor:
    """Written out, with keys and values that are fixed maps of the tokens."""
    draw = torch.Generator().manual_seed(7)
    width = tokens.shape[-1]
    to_key, to_value = torch.randn(2, width, width, generator=draw, dtype=torch.float64)
    logits = query @ (tokens @ to_key).mT / math.sqrt(width)
    logits = logits if bias is None else logits + bias[:, None]
    return logits.softmax(-1) @ (tokens @ to_value)


QUERY = torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@EVERY
def test_real_tokens_are_untouched_and_all_tokens_count_from_then_on(padding):
    cond = prompts([0, 1, 3, 8], 8)
    found = padding(cond, range(4), seed=0)
    assert torch.equal(found.text[cond.text_mask], cond.text[cond.text_mask])
    assert found.text_mask is None
    assert found.text.dtype == torch.float64
    assert torch.isfinite(found.text).all()
    assert torch.equal(found.text[3], cond.text[3])  # a prompt of full length is unchanged
    assert not found.text[0].any()  # and one without tokens has nothing to repeat


@EVERY
def test_what_stood_in_the_padding_does_not_matter(padding):
    clean, dirty = prompts([1, 3], 8), prompts([1, 3], 8, junk=math.nan)
    found = [padding(cond, range(2), seed=0).text for cond in (clean, dirty)]
    assert torch.equal(*found)


def test_each_kind_fills_as_the_table_says():
    cond = prompts([3], 8)
    tokens = cond.text[0, :3]
    zero, copies = (Padding(kind)(cond, [0], seed=0).text[0] for kind in ("zero", "replicate"))
    assert torch.equal(zero, torch.cat([tokens, torch.zeros(5, 6)]))
    assert torch.equal(copies, tokens[[0, 1, 2, 0, 1, 2, 0, 1]])
    assert torch.equal(Padding("noisy", beta=0.0)(cond, [0], seed=0).text[0], copies)


@pytest.mark.parametrize(
    ("count", "length", "added"), [(4, 8, 1), (4, 9, 2), (4, 12, 2), (2, 9, 4)]
)
def test_the_noise_has_the_spread_of_the_tokens_times_the_root_of_the_copies(count, length, added):
    """Its mean is 0 and its deviation, per channel, beta * sqrt(m) * std: over 4,000 images."""
    one = prompts([count], length, 3)
    tokens, beta, images = one.text[0, :count], 0.05, 4000
    cond = one.expand(images)
    noisy = Padding("noisy", beta)(cond, range(images), seed=3).text
    extra = (noisy - Padding("replicate")(cond, range(images), seed=3).text)[:, count:]
    std = (tokens - tokens.mean(0)).square().mean(0).sqrt()
    wanted = beta * math.sqrt(added) * std
    values = (extra / wanted).flatten(0, 1)
    error = 1 / math.sqrt(len(values))
    assert values.mean(0).abs().max() < 4 * error
    assert (values.std(0) - 1).abs().max() < 4 * error / math.sqrt(2)
    assert (values.T.corrcoef() - torch.eye(3)).abs().max() < 4 * error  # channels are independent


def test_noise_belongs_to_the_image_whatever_its_batch():
    cond = prompts([1, 2, 3, 4], 8)
    padding = Padding("noisy", beta=0.05)
    whole = padding(cond, torch.tensor([5, 9, 2, 7]), seed=1).text
    part = padding(cond[1:3], [9, 2], seed=1).text
    assert torch.equal(whole[1:3], part)
    for other in (
        padding(cond[1:3], [9, 3], seed=1),
        padding(cond[1:3], [9, 2], seed=2),
        padding(cond[1:3], [9, 2], seed=1, purpose="validation/padding"),
    ):
        assert not torch.equal(other.text[1], part[1])
    assert torch.equal(padding(cond[1:3], [9, 3], seed=1).text[0], part[0])
    with pytest.raises(ValueError, match="1 keys for 4 prompts"):
        padding(cond, [0], seed=0)


def test_a_single_token_has_no_spread_and_no_infinite_gradient():
    cond = prompts([0, 1, 3], 8)
    text = cond.text.clone().requires_grad_()
    found = Padding("noisy", beta=0.05)(
        Condition(text=text, text_mask=cond.text_mask), range(3), seed=0
    )
    assert torch.equal(found.text[1], text[1, :1].expand(8, 6))
    found.text.square().sum().backward()
    assert torch.isfinite(text.grad).all()


def test_half_precision_and_long_prompts_count_their_copies_exactly():
    """257 positions for 256 tokens are one copy more, which bfloat16 cannot tell from none."""
    cond = prompts([256], 257).to(dtype=torch.bfloat16)
    found = Padding("noisy", beta=0.5)(cond, [0], seed=0).text
    assert found.dtype == torch.bfloat16
    assert not torch.equal(found[0, 256], cond.text[0, 0])


def test_a_condition_without_padding_is_left_alone():
    text = torch.ones(2, 3, 4)
    for cond in (Condition(text=text), Condition(label=torch.tensor([1, 2]))):
        assert Padding()(cond, range(2), seed=0) is cond


def test_padding_on_the_left_is_refused():
    mask = torch.tensor([[False, True, True]])
    with pytest.raises(ValueError, match="pad on the right"):
        Padding("zero")(Condition(text=torch.ones(1, 3, 2), text_mask=mask), [0], seed=0)


# ---------------------------------------------------------------- attention


@given(st.integers(1, 9), st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_cross_attention_over_whole_copies_is_that_of_the_bare_prompt(count, times):
    cond = prompts([count], count * times)
    bare = attention(QUERY, cond.text[:, :count])
    copies = Padding("noisy", beta=0.0)(cond, [0], seed=0)
    torch.testing.assert_close(attention(QUERY, copies.text), bare, rtol=0, atol=1e-12)
    if times > 1:
        zeros = Padding("zero")(cond, [0], seed=0)
        assert (attention(QUERY, zeros.text) - bare).abs().max() > 1e-3


@given(st.integers(1, 9), st.integers(0, 30))
@settings(max_examples=25, deadline=None)
def test_with_the_bias_joint_attention_is_that_of_the_bare_prompt_at_any_length(count, spare):
    cond = prompts([count], count + spare)
    image = torch.randn(1, 7, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    bare = attention(QUERY, torch.cat([image, cond.text[:, :count]], 1))
    padded = Padding("replicate")(cond, [0], seed=0)
    joint = torch.cat([image, padded.text], 1)
    bias = F.pad(log_copies(cond.text_mask), (7, 0))
    torch.testing.assert_close(attention(QUERY, joint, bias), bare, rtol=0, atol=1e-12)
    if spare:
        assert (attention(QUERY, joint) - bare).abs().max() > 1e-4


def test_the_bias_counts_copies_per_token():
    mask = torch.arange(8) < torch.tensor([3, 8, 1, 0])[:, None]
    copies = (-log_copies(mask)).exp()
    assert copies[0].tolist() == pytest.approx([3, 3, 2, 3, 3, 2, 3, 3])
    assert copies[1].tolist() == pytest.approx([1] * 8)
    assert copies[2].tolist() == pytest.approx([8] * 8)
    assert copies[3].tolist() == pytest.approx([8] * 8)  # one token of zeros


def test_the_bias_is_what_torchs_attention_takes_as_its_mask():
    """As the docstring applies it: two prompts, two heads, image tokens first."""
    cond = prompts([2, 3], 7, 4)
    draw = torch.Generator().manual_seed(3)
    image = torch.randn(2, 5, 4, generator=draw, dtype=torch.float64)
    padded = Padding("replicate")(cond, range(2), seed=0).text
    bias = F.pad(log_copies(cond.text_mask), (5, 0))[:, None, None]

    def heads(tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (2, 2)).transpose(1, 2)

    joint = heads(torch.cat([image, padded], 1))
    found = F.scaled_dot_product_attention(joint, joint, joint, attn_mask=bias)
    for row, count in enumerate((2, 3)):
        bare = heads(torch.cat([image[row], cond.text[row, :count]])[None])
        wanted = F.scaled_dot_product_attention(bare, bare, bare)[0, :, : 5 + count]
        torch.testing.assert_close(found[row, :, : 5 + count], wanted, rtol=0, atol=1e-12)
