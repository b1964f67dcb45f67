"""KDA for any shape, split, regime of gates and set of checkpoints."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_lab.reference import kda

torch.set_num_threads(1)
FAST = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Draw q, k, v, g, beta of one to 90 tokens and an incoming state, all float64."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    keys, values = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    length = draw(st.integers(1, 90))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sharpness = draw(st.sampled_from([0.0, 1.0, 10.0, 1000.0]))  # 1000: every gate at an end
    alike = draw(st.sampled_from([0.0, 5.0]))  # how much keys resemble one another

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    k = kda.l2norm(normal(batch, length, heads, keys) + alike)
    q = kda.l2norm(normal(batch, length, heads, keys)) * keys**-0.5
    g = -5 * torch.sigmoid(sharpness * normal(batch, length, heads, keys))
    beta = torch.sigmoid(3 * normal(batch, length, heads))
    v = normal(batch, length, heads, values)
    return [q, k, v, g, beta], normal(batch, heads, keys, values)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    scale = max(want.abs().max().item(), 1e-3) if want.numel() else 1.0
    assert (got - want).abs().max().item() <= 1e-12 * scale if want.numel() else True


@FAST
@given(sequences(), st.integers(1, 80))
def test_chunked_is_recurrent(sequence, chunk_size: int) -> None:
    inputs, state = sequence
    o, after, _ = kda.chunked(*inputs, state, chunk_size)
    want_o, want_after = kda.recurrent(*inputs, state)
    assert_close(o, want_o)
    assert_close(after, want_after)


@FAST
@given(sequences(), st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=4))
def test_any_split_over_both_forms_is_the_whole(sequence, cuts) -> None:
    inputs, state = sequence
    length = inputs[0].shape[1]
    want_o, want_after = kda.recurrent(*inputs, state)
    bounds = sorted({0, length, *(round(f * length) for f, _ in cuts)})
    forms = [kda.chunked if chunk else kda.recurrent for _, chunk in cuts] + [kda.chunked] * 2
    outputs = []
    for form, start, stop in zip(forms, bounds, bounds[1:], strict=False):
        o, state = form(*(x[:, start:stop] for x in inputs), state)[:2]
        outputs.append(o)
    assert_close(torch.cat(outputs, 1), want_o)
    assert_close(state, want_after)


@FAST
@given(sequences(), st.sets(st.floats(0, 1), max_size=5), st.integers(1, 70))
def test_any_checkpoint_is_the_state_there(sequence, fractions, chunk_size: int) -> None:
    inputs, state = sequence
    positions = {round(f * inputs[0].shape[1]) for f in fractions}
    *_, checkpoints = kda.chunked(*inputs, state, chunk_size, checkpoint_at=positions)
    assert checkpoints.keys() == positions
    for position, got in checkpoints.items():
        assert_close(got, kda.recurrent(*(x[:, :position] for x in inputs), state)[1])


@FAST
@given(sequences(), st.floats(0, 1))
def test_convolution_streams_across_any_cut(sequence, fraction: float) -> None:
    u = sequence[0][2].flatten(2)
    weight = torch.randn(u.shape[-1], 4, dtype=u.dtype, generator=torch.Generator().manual_seed(0))
    cut = round(fraction * u.shape[1])
    whole, last = kda.short_conv(u, weight)
    first, window = kda.short_conv(u[:, :cut], weight)
    second, window = kda.short_conv(u[:, cut:], weight, window)
    assert_close(torch.cat((first, second), 1), whole)
    assert torch.equal(window, last)
