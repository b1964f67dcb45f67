"""The whole model: against a second implementation, across steps, through the mixer seam."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from numpy_k3 import NumpyK3

from kimik3_lab.config import K3Config, LinearAttentionConfig
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM, SequenceMixer, SequenceState
from kimik3_lab.tensors import checkpoint_tensors

torch.set_num_threads(1)
F64 = torch.float64
TINY, MICRO = K3Config.tiny(), K3Config.micro()
#: The older gate, a block size that leaves a partial block, every knob off its usual value.
ODD = dataclasses.replace(
    MICRO,
    num_hidden_layers=5,
    attn_res_block_size=2,
    first_k_dense_replace=2,
    routed_scaling_factor=2.5,
    rms_norm_eps=1e-2,
    mla_norm_eps=1e-1,
    activation_situ_beta=0.5,
    activation_situ_linear_beta=2.0,
    num_attention_heads=3,
    linear_attn_config=LinearAttentionConfig(
        num_heads=5,
        head_dim=4,
        short_conv_kernel_size=3,
        gate_lower_bound=None,
        kda_layers=(1, 3, 4),
        full_attn_layers=(2, 5),
    ),
)


def tokens(count: int, config: K3Config, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (count,), generator=generator)


@torch.inference_mode()
def run(model: K3ForCausalLM, *steps: torch.Tensor, **options) -> torch.Tensor:
    mixer = SequenceMixer(model.new_state(), **options)
    return torch.cat([model(step, mixer) for step in steps])


@pytest.fixture(scope="module")
def tiny() -> K3ForCausalLM:
    return random_model(TINY, 0, dtype=F64)


@pytest.mark.parametrize(
    ("config", "seed", "count"), [(TINY, 0, 40), (MICRO, 1, 40), (MICRO, 2, 5), (ODD, 3, 40)]
)
def test_forward_equals_a_second_implementation(config: K3Config, seed: int, count: int) -> None:
    model = random_model(config, seed, dtype=F64)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    token_ids = tokens(count, config, seed)
    want = torch.from_numpy(NumpyK3(config, weights).logits(token_ids.tolist()))
    got = run(model, token_ids)
    assert got.dtype is F64
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    assert want.std() > 0.5  # or the comparison would say little


def test_state_dict_is_the_checkpoint(tiny: K3ForCausalLM) -> None:
    unpacked = dataclasses.replace(TINY, expert_dtype="bf16")
    specs = {spec.name: spec.shape for spec in checkpoint_tensors(unpacked, prefix="")}
    assert {name: tuple(value.shape) for name, value in tiny.state_dict().items()} == specs


@pytest.mark.parametrize("cut", [1, 2, 16, 17, 19])
def test_prefill_then_decode_is_the_full_forward(tiny: K3ForCausalLM, cut: int) -> None:
    token_ids = tokens(20, TINY, cut)
    split = run(tiny, token_ids[:cut], *token_ids[cut:].split(1))
    torch.testing.assert_close(split, run(tiny, token_ids), rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def whole(tiny: K3ForCausalLM) -> torch.Tensor:
    return run(tiny, tokens(130, TINY))


@pytest.mark.parametrize("sizes", [(64, 66), (1, 2, 127), (65, 1, 64), (50, 40, 40)])
def test_prefill_in_pieces_is_the_full_forward(
    tiny: K3ForCausalLM, whole: torch.Tensor, sizes: tuple
) -> None:
    split = run(tiny, *tokens(130, TINY).split(sizes))
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{"form": "decode"}, {"form": "prefill"}, {"chunk_size": 7}])
def test_forms_of_the_mixer_agree(tiny: K3ForCausalLM, options: dict) -> None:
    steps = tokens(20, TINY).split((13, 1, 6))
    torch.testing.assert_close(run(tiny, *steps, **options), run(tiny, *steps), rtol=0, atol=1e-10)


def test_float32_stays_close_to_float64(tiny: K3ForCausalLM) -> None:
    token_ids = tokens(60, TINY)
    got = run(random_model(TINY, 0), token_ids)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), run(tiny, token_ids), rtol=0, atol=2e-3)


def test_bfloat16_runs_and_gives_float32_logits(tiny: K3ForCausalLM) -> None:
    model = random_model(TINY, 0, dtype=torch.bfloat16)
    token_ids = tokens(8, TINY)
    got = run(model, token_ids[:5], *token_ids[5:].split(1))
    assert got.dtype is torch.float32
    want = run(tiny, token_ids)
    assert torch.corrcoef(torch.stack((got.flatten().double(), want.flatten())))[0, 1] > 0.9


def test_earlier_logits_do_not_depend_on_later_tokens(tiny: K3ForCausalLM) -> None:
    token_ids = tokens(20, TINY)
    changed = token_ids.clone()
    changed[12:] = (changed[12:] + 1) % TINY.vocab_size
    one, other = run(tiny, token_ids), run(tiny, changed)
    torch.testing.assert_close(one[:12], other[:12], rtol=0, atol=1e-12)
    assert (one[12:] - other[12:]).abs().amax(-1).min() > 1e-3


def test_first_layer_attention_residual_pair_is_never_used() -> None:
    model = random_model(MICRO, 0)
    want = run(model, tokens(5, MICRO))
    first = model.model.layers[0]
    for module in (first.self_attention_res_norm, first.self_attention_res_proj):
        module.weight.data.fill_(torch.nan)
    assert torch.equal(run(model, tokens(5, MICRO)), want)


def test_logits_at_selects_rows(tiny: K3ForCausalLM) -> None:
    token_ids = tokens(9, TINY)
    with torch.inference_mode():
        got = tiny(token_ids, SequenceMixer(tiny.new_state()), logits_at=torch.tensor([8, 0, 8]))
    torch.testing.assert_close(got, run(tiny, token_ids)[[8, 0, 8]], rtol=0, atol=1e-12)


def test_taps_are_the_running_sum_after_a_layer(tiny: K3ForCausalLM) -> None:
    token_ids = tokens(5, TINY)
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, args, __, i=i: seen.update({i: args[0].prefix}))
        for i, layer in enumerate(tiny.model.layers)
    ]
    taps = {0: None, 3: None, 6: None}
    with torch.inference_mode():
        logits = tiny(token_ids, SequenceMixer(tiny.new_state()), taps=taps)
    for hook in hooks:
        hook.remove()
    assert set(taps) == {0, 3, 6}
    for layer_id, tap in taps.items():
        assert torch.equal(tap, seen[layer_id])
    assert not torch.equal(taps[0], taps[3])
    assert torch.equal(logits, run(tiny, token_ids))


@pytest.mark.parametrize(
    "bad", [torch.zeros(0, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64), torch.ones(3)]
)
def test_forward_refuses_what_is_no_flat_list_of_ids(bad: torch.Tensor) -> None:
    model = random_model(MICRO, 0)
    with pytest.raises(ValueError, match="flat int64 tensor with at least one token"):
        model(bad, SequenceMixer(model.new_state()))


class SideBySide:
    """Several sequences in one step, each with its own rows: what an engine does."""

    def __init__(self, mixers: list[SequenceMixer], sizes: list[int]) -> None:
        self.mixers, self.sizes = mixers, sizes

    def _each(self, name, layer_id, rows, *rest):
        parts = zip(self.mixers, *(x.split(self.sizes) for x in rows), strict=True)
        return torch.cat([getattr(mixer, name)(layer_id, *part, *rest) for mixer, *part in parts])

    def conv(self, layer_id, u, weight):
        return self._each("conv", layer_id, (u,), weight)

    def kda(self, layer_id, *rows):
        return self._each("kda", layer_id, rows)

    def mla(self, layer_id, q, latent, kv_b, config):
        return self._each("mla", layer_id, (q, latent), kv_b, config)


@torch.inference_mode()
def test_sequences_side_by_side_do_not_see_each_other(tiny: K3ForCausalLM) -> None:
    a, b = tokens(12, TINY, 1), tokens(9, TINY, 2)
    mixers = [SequenceMixer(tiny.new_state()) for _ in range(2)]
    first = tiny(torch.cat((a[:11], b[:2])), SideBySide(mixers, [11, 2]))
    second = tiny(torch.cat((a[11:], b[2:])), SideBySide(mixers, [1, 7]))
    got_a, got_b = torch.cat((first[:11], second[:1])), torch.cat((first[11:], second[1:]))
    torch.testing.assert_close(got_a, run(tiny, a), rtol=0, atol=1e-10)
    torch.testing.assert_close(got_b, run(tiny, b), rtol=0, atol=1e-10)


# -- generate --------------------------------------------------------------------------------------


def test_generate_is_argmax_of_the_full_forward(tiny: K3ForCausalLM) -> None:
    prompt = tokens(6, TINY, 5).tolist()
    output = tiny.generate(prompt, 8, stop_token_ids=())
    logits = run(tiny, torch.tensor(prompt + output))
    assert output == logits[5:-1].argmax(-1).tolist()
    assert all(type(token) is int for token in output)


def test_generate_stops_after_a_stop_token_and_keeps_it(tiny: K3ForCausalLM) -> None:
    output = tiny.generate([0, 7], 8, stop_token_ids=())
    assert len(output) == 8 and len(set(output[:4])) == 4
    assert tiny.generate([0, 7], 8, stop_token_ids={output[3]}) == output[:4]
    config = dataclasses.replace(TINY, eos_token_id=output[2])
    model = random_model(config, 0, dtype=F64)
    assert model.generate([0, 7], 8) == output[:3]
    assert model.generate([0, 7], 2) == output[:2]


def test_generate_refuses_what_cannot_run() -> None:
    model = random_model(MICRO, 0)  # vocabulary 64, context 256
    with pytest.raises(ValueError, match="ids from 0 to 63, got an empty prompt"):
        model.generate([], 4)
    for bad in (-1, 64):
        with pytest.raises(ValueError, match=f"got token id {bad}"):
            model.generate([3, bad], 4)
    with pytest.raises(
        ValueError, match=r"from 1 to 56: the context of 256.*prompt of 200; got 57"
    ):
        model.generate([5] * 200, 57)
    with pytest.raises(ValueError, match="got 0"):
        model.generate([5], 0)


# -- state -----------------------------------------------------------------------------------------


@torch.inference_mode()
def test_state_has_the_shapes_of_the_configuration(tiny: K3ForCausalLM) -> None:
    mixer = SequenceMixer(tiny.new_state())
    assert mixer.state.num_tokens == 0
    tiny(tokens(7, TINY), mixer)
    tiny(tokens(1, TINY), mixer)
    state = mixer.state
    assert state.num_tokens == 8
    kda, mla = (0, 1, 2, 4, 5, 6, 8, 9, 10), (3, 7, 11, 12)
    assert {i: tuple(t.shape) for i, t in state.recurrent.items()} == dict.fromkeys(
        kda, (3, 64, 64)
    )
    assert {i: tuple(t.shape) for i, t in state.conv.items()} == dict.fromkeys(kda, (576, 3))
    assert {i: tuple(t.shape) for i, t in state.latent.items()} == dict.fromkeys(mla, (8, 576))
    assert state.nbytes == 8 * (9 * (3 * 64 * 64 + 576 * 3) + 4 * 8 * 576)


def test_num_tokens_counts_when_the_last_layer_is_kda() -> None:
    linear = dataclasses.replace(
        MICRO.linear_attn_config, kda_layers=(1, 2, 4), full_attn_layers=(3,)
    )
    model = random_model(dataclasses.replace(MICRO, linear_attn_config=linear), 0)
    mixer = SequenceMixer(model.new_state())
    with torch.inference_mode():
        model(torch.tensor([1, 2, 3]), mixer)
        model(torch.tensor([4]), mixer)
    assert mixer.state.num_tokens == 4


@torch.inference_mode()
def test_clone_is_a_snapshot_to_return_to(tiny: K3ForCausalLM) -> None:
    token_ids = tokens(10, TINY)
    mixer = SequenceMixer(tiny.new_state())
    tiny(token_ids[:6], mixer)
    snapshot = mixer.state.clone()
    for group in ("recurrent", "conv", "latent"):
        for layer_id, tensor in getattr(mixer.state, group).items():
            assert tensor.data_ptr() != getattr(snapshot, group)[layer_id].data_ptr()
    want = tiny(token_ids[6:], mixer)
    for group in ("recurrent", "conv", "latent"):
        for layer_id, tensor in getattr(mixer.state, group).items():
            assert not torch.equal(tensor, getattr(snapshot, group)[layer_id])
    assert (snapshot.num_tokens, mixer.state.num_tokens) == (6, 10)
    assert torch.equal(tiny(token_ids[6:], SequenceMixer(snapshot)), want)


def test_state_types_follow_the_model() -> None:
    state = SequenceState.empty(MICRO, dtype=torch.bfloat16)
    assert state.recurrent[0].dtype is torch.float32
    assert state.conv[0].dtype is state.latent[2].dtype is torch.bfloat16


def test_mixer_refuses_an_unknown_form() -> None:
    with pytest.raises(ValueError, match="got 'fast'"):
        SequenceMixer(SequenceState.empty(MICRO), form="fast")


@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [([1.5], 2), ([1], 1.5), (["a"], 2), (torch.tensor([0.5]), 2)]
)
def test_generate_wants_whole_numbers(prompt: object, max_tokens: object) -> None:
    with pytest.raises(ValueError, match="must be whole numbers"):
        random_model(MICRO, 0).generate(prompt, max_tokens)


def test_generate_takes_a_tensor_as_well() -> None:
    model = random_model(MICRO, 0)
    assert model.generate(torch.tensor([0, 7, 9]), 4) == model.generate([0, 7, 9], 4)
