"""The DSpark drafter: context, block, Markov loop, and drafting for a real (small) target."""

from __future__ import annotations

import dataclasses
import itertools
import json
from math import prod

import pytest
import torch
from drafter_support import Speculation, random_drafter, teach_bigrams
from scipy import stats

from kimik3_lab.config import ConfigError, K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference import drafter_layers
from kimik3_lab.reference.drafter import DraftState, DSparkDrafter
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.speculative import Rule, block_rule, standard_rule, verify
from kimik3_lab.reference.state import SequenceMixer

torch.set_num_threads(1)
F64 = torch.float64
MICRO = K3Config.micro()
SMALL = DSparkConfig.for_target(MICRO)
PROMPT = [0, 17, 5, 44, 9, 23, 31, 8, 60]


@pytest.fixture(scope="module")
def target() -> K3ForCausalLM:
    return random_model(MICRO, 0, dtype=F64)


@pytest.fixture(scope="module")
def drafter() -> DSparkDrafter:
    return random_drafter(SMALL, 1)


@pytest.fixture(scope="module")
def taps(target: K3ForCausalLM, drafter: DSparkDrafter) -> dict:
    """Of the prompt; not to be changed."""
    seen = drafter.new_taps()
    with torch.inference_mode():
        target(torch.tensor(PROMPT), SequenceMixer(target.new_state()), taps=seen)
    return seen


def context_of(drafter: DSparkDrafter, taps: dict, *counts: int) -> DraftState:
    """Context written in pieces of ``counts`` tokens."""
    state, start = drafter.new_state(), 0
    for count in counts:
        piece = {i: rows[start : start + count] for i, rows in taps.items()}
        drafter.write_context(piece, state)
        start += count
    return state


# -- configuration ---------------------------------------------------------------------------------


def test_released_shape_has_67_tensors_of_its_own() -> None:
    shapes = {n: tuple(v.shape) for n, v in DSparkDrafter(DSparkConfig(), device="meta")
              .state_dict().items()}  # fmt: skip
    assert len(shapes) == 67
    total = sum(map(prod, shapes.values()))
    assert total == 2_387_907_841
    # With the copy of the embedding that is in the release: 68 tensors and the published 3.56 B.
    assert round((total + 163_840 * 7168) / 1e9, 2) == 3.56


#: ``config.json`` of Inferact/Kimi-K3-DSpark, as public exporters write it.
PUBLISHED = {
    "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", "hidden_size": 7168,
    "intermediate_size": 14336, "num_hidden_layers": 5, "num_attention_heads": 64,
    "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": False, "mla_use_output_gate": False,
    "vocab_size": 163840, "rms_norm_eps": 1e-05, "max_position_embeddings": 1048576,
    "rope_theta": 50000.0, "num_target_layers": 5, "target_hidden_size": 7168,
    "target_num_hidden_layers": 93, "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837, "markov_rank": 256, "markov_head_type": "vanilla",
    "enable_confidence_head": True, "confidence_head_with_markov": True,
    "tie_word_embeddings": False, "draft_vocab_size": 163840,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def test_published_configuration_is_the_default() -> None:
    assert DSparkConfig.from_dict(PUBLISHED) == DSparkConfig()
    written = json.loads(json.dumps(DSparkConfig().to_dict()))
    assert written | PUBLISHED == written, "a published field is missing or differs"
    assert set(written) - set(PUBLISHED) == {"block_size", "hidden_act"}


@pytest.mark.parametrize(
    "config", [DSparkConfig(), SMALL, dataclasses.replace(SMALL, confidence_head=False)]
)
def test_json_round_trip(config: DSparkConfig, tmp_path) -> None:
    config.save(tmp_path)
    assert DSparkConfig.load(tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": ()}, "at least one layer"),
        ({"target_layer_ids": (3, 2)}, r"ascending and each once, got \(3, 2\)"),
        ({"target_layer_ids": (2, 2)}, "ascending and each once"),
        ({"target_layer_ids": (-1, 2)}, r"0-based layers of a target.*got \(-1, 2\)"),
        ({"target_layer_ids": (2, 93)}, "target_num_hidden_layers=93"),
        ({"mask_token_id": 163_840}, "mask_token_id=163840 lies outside vocab_size=163840"),
        ({"mask_token_id": -1}, "mask_token_id must be an integer of at least 0, got -1"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"markov_rank": 2.0}, "markov_rank must be an integer of at least 1, got 2.0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a number above 0"),
        ({"hidden_size": 64}, "hidden_size=64 must equal target_hidden_size=7168"),
        ({"qk_rope_head_dim": 63}, "must be even"),
        ({"rope_factor": 0.5}, "rope_factor must be at least 1"),
    ],
)
def test_bad_values_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(DSparkConfig(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "kimi_linear"}, "model_type is 'kimi_linear'"),
        ({"mla_use_nope": True}, "mla_use_nope=True is not supported, expected False: keys carry"),
        ({"mla_use_output_gate": True}, "has no gate weights"),
        ({"hidden_act": "situ"}, "hidden_act='situ'"),
        ({"markov_head_type": "rnn"}, "markov_head_type='rnn'"),
        ({"num_target_layers": 4}, "num_target_layers must be 5 here, got 4"),
        ({"draft_vocab_size": 32_000}, "draft_vocab_size must be 163840 here, got 32000"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must be 64 here, got 8"),
        ({"rope_parameters": None}, "rope_parameters is missing"),
        ({"rope_parameters": PUBLISHED["rope_parameters"] | {"beta_fast": 16}},
         r"rope_parameters\.beta_fast=16"),
        ({"rope_parameters": PUBLISHED["rope_parameters"] | {"rope_type": "llama3"}},
         "'llama3' is neither"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_factor is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"target_layer_ids": "2,23"}, "must be a list of integers"),
    ],
)  # fmt: skip
def test_a_drafter_of_another_form_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DSparkConfig.from_dict(PUBLISHED | changes)


def test_unreadable_configuration_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"no .*config\.json"):
        DSparkConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        DSparkConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json: expected a JSON object, got list"):
        DSparkConfig.load(tmp_path)


@pytest.mark.parametrize("make", [K3Config.released, K3Config.tiny, K3Config.micro])
def test_for_target_fits_its_target(make) -> None:
    config = DSparkConfig.for_target(make())
    assert config.target_layer_ids[-1] == make().num_hidden_layers - 2
    assert config.hidden_size == make().hidden_size


# -- context ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(1,) * 9, (4, 5), (0, 8, 1)])
def test_context_in_pieces_is_the_context_at_once(drafter, taps, counts) -> None:
    whole, pieces = context_of(drafter, taps, 9), context_of(drafter, taps, *counts)
    assert whole.num_tokens == pieces.num_tokens == 9
    for a, b in zip(whole.latent, pieces.latent, strict=True):
        assert a.shape == (9, SMALL.kv_lora_rank + SMALL.qk_rope_head_dim)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_rows_take_in_the_first_tokens_only(drafter, taps) -> None:
    state = drafter.new_state()
    drafter.write_context(taps, state, 4)
    drafter.write_context({i: rows[4:] for i, rows in taps.items()}, state, 0)
    assert state.num_tokens == 4
    for a, b in zip(state.latent, context_of(drafter, taps, 4).latent, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_truncate_forgets_later_tokens(drafter, taps) -> None:
    state = context_of(drafter, taps, 9)
    state.truncate(4)
    assert state.num_tokens == 4
    for a, b in zip(state.latent, context_of(drafter, taps, 4).latent, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    for count in (-1, 5):
        with pytest.raises(ValueError, match=f"cannot keep {count} of 4 tokens"):
            state.truncate(count)
    assert DraftState().num_tokens == 0


def test_missing_or_uneven_taps_are_an_error(drafter, taps) -> None:
    first = SMALL.target_layer_ids[0]
    for bad in ({}, taps | {first: None}, drafter.new_taps()):
        with pytest.raises(ValueError, match=f"no tap of layer {first}: pass new_taps"):
            drafter.write_context(bad, drafter.new_state())
    for bad, rows in ((taps, 10), (taps, -1), (taps | {first: taps[first][:3]}, None)):
        with pytest.raises(ValueError, match=r"cannot take -?\d+ rows of taps with \[\d, 9\]"):
            drafter.write_context(bad, drafter.new_state(), rows)


def test_taps_are_the_running_sum_and_not_the_mixture(target, drafter, taps) -> None:
    """Layer 1 lies in block 0, so its running sum is what its sublayers and layer 0's put out."""
    outputs, mixtures = [], []
    hooks = [
        module.register_forward_hook(lambda _m, _i, y: outputs.append(y))
        for layer in target.model.layers[:2]
        for module in (layer.self_attn, getattr(layer, layer._ffn))
    ]
    norm = target.model.layers[2].input_layernorm
    hooks.append(norm.register_forward_hook(lambda _m, x, _y: mixtures.append(x[0])))
    with torch.inference_mode():
        target(torch.tensor(PROMPT), SequenceMixer(target.new_state()))
    for hook in hooks:
        hook.remove()
    assert SMALL.target_layer_ids[0] == 1
    torch.testing.assert_close(taps[1], sum(outputs), rtol=0, atol=1e-12)
    assert (taps[1] - mixtures[0]).abs().max() > 0.1


# -- block -----------------------------------------------------------------------------------------


def block(drafter: DSparkDrafter, rows: torch.Tensor, context: DraftState) -> torch.Tensor:
    """All layers over ``rows``."""
    positions = torch.arange(context.num_tokens, context.num_tokens + len(rows))
    for layer, latent in zip(drafter.layers, context.latent, strict=True):
        rows = layer(rows, positions, latent)
    return rows


def test_a_later_row_changes_an_earlier_rows_output(drafter, taps) -> None:
    context, rows = context_of(drafter, taps, 9), torch.randn(7, 64, dtype=F64)
    want = block(drafter, rows, context)
    for changed in (0, 6):
        other = rows.clone()
        other[changed] += 1
        assert (block(drafter, other, context) - want).abs().amax(-1).min() > 1e-4


def test_every_row_sees_every_row_of_the_context(drafter, taps) -> None:
    rows = torch.randn(7, 64, dtype=F64)
    want = block(drafter, rows, context_of(drafter, taps, 9))
    for position in (0, 8):
        changed = {i: tap.clone() for i, tap in taps.items()}
        changed[1][position] += 1
        got = block(drafter, rows, context_of(drafter, changed, 9))
        assert (got - want).abs().amax(-1).min() > 1e-5


def test_attention_layer_against_a_loop(drafter, taps) -> None:
    """One query, one head, one key at a time; nothing absorbed."""
    attend, context = drafter.layers[0].self_attn, context_of(drafter, taps, 9).latent[0]
    x, positions = torch.randn(3, 64, dtype=F64), torch.arange(9, 12)
    rows = torch.cat((context, attend.latent(x, positions)))
    rank, nope, value = SMALL.kv_lora_rank, SMALL.qk_nope_head_dim, SMALL.v_head_dim
    heads = SMALL.num_attention_heads
    q = attend.q_b_proj(attend.q_a_layernorm(attend.q_a_proj(x))).view(3, heads, -1)
    up = attend.kv_b_proj.weight.view(heads, nope + value, rank)
    out = torch.zeros(3, heads, value, dtype=F64)
    for n, h in itertools.product(range(3), range(heads)):
        turned = drafter_layers.rotate(
            q[n : n + 1, h, nope:], positions[n : n + 1], attend.frequencies
        )
        scores = torch.stack([
            ((up[h, :nope] @ row[:rank]) @ q[n, h, :nope] + row[rank:] @ turned[0])
            * (nope + SMALL.qk_rope_head_dim) ** -0.5
            for row in rows
        ])  # fmt: skip
        out[n, h] = scores.softmax(0) @ (rows[:, :rank] @ up[h, nope:].T)
    want = attend.o_proj(out.flatten(1))
    torch.testing.assert_close(attend(x, positions, context), want, rtol=0, atol=1e-12)


def test_stretched_positions_sharpen_the_scores() -> None:
    config = dataclasses.replace(SMALL, rope_factor=32.0, original_max_position_embeddings=256)
    plain, sharp = (random_drafter(c, 1).layers[0].self_attn for c in (SMALL, config))
    assert sharp.scale / plain.scale == pytest.approx(1.813, abs=1e-3)


def test_positions_count_from_the_start_of_the_sequence(drafter, target, taps) -> None:
    want = drafter.draft(5, context_of(drafter, taps, 9), target)
    seen = []

    def watch(x, positions, frequencies, rotate=drafter_layers.rotate):
        seen.append(positions.tolist())
        return rotate(x, positions, frequencies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter_layers, "rotate", watch)
        state = context_of(drafter, taps, 4, 5)
        written, seen[:] = seen[:], []
        draft = drafter.draft(5, state, target)
    layers = SMALL.num_hidden_layers
    assert written == [list(range(4))] * layers + [list(range(4, 9))] * layers
    assert seen == [list(range(9, 16))] * layers * 2  # query and key of each layer
    assert draft.token_ids.equal(want.token_ids)
    assert state.num_tokens == 9  # the block leaves no row behind


def test_positions_matter(drafter, taps) -> None:
    """Two swapped context rows would be nothing to an attention without positions."""
    rows = torch.randn(7, 64, dtype=F64)
    order = torch.tensor([1, 0, *range(2, 9)])
    swapped = {i: tap[order] for i, tap in taps.items()}
    one, other = (block(drafter, rows, context_of(drafter, t, 9)) for t in (taps, swapped))
    assert (one - other).abs().max() > 1e-4


# -- drafting --------------------------------------------------------------------------------------


def test_shapes_and_types(drafter, target, taps) -> None:
    for dtype, wide in ((F64, F64), (torch.float32, torch.float32)):
        small = random_drafter(SMALL, 1, dtype=dtype)
        state = context_of(small, taps, 9)
        assert state.latent[0].dtype is dtype
        draft = small.draft(5, state, target)
        assert (draft.token_ids.shape, draft.token_ids.dtype) == ((7,), torch.int64)
        assert (draft.probs.shape, draft.probs.dtype) == ((7, 64), wide)
        assert (draft.confidence.shape, draft.confidence.dtype) == ((7,), wide)
        assert ((draft.confidence > 0) & (draft.confidence < 1)).all()


def test_bfloat16_drafts_in_float32_at_the_end(taps) -> None:
    small = random_drafter(SMALL, 1, dtype=torch.bfloat16)
    assert small.confidence_head.proj.weight.dtype is torch.float32
    state = context_of(small, taps, 9)
    draft = small.draft(5, state, random_model(MICRO, 0, dtype=torch.bfloat16))
    assert state.latent[0].dtype is torch.bfloat16
    assert draft.probs.dtype is draft.confidence.dtype is torch.float32


def test_greedy_probabilities_are_one_hot(drafter, target, taps) -> None:
    draft = drafter.draft(5, context_of(drafter, taps, 9), target)
    assert torch.equal(draft.probs.argmax(-1), draft.token_ids)
    assert torch.equal(draft.probs.sum(-1), torch.ones(7, dtype=F64))
    assert ((draft.probs == 0) | (draft.probs == 1)).all()


def test_block_of_one_token_and_of_other_lengths(drafter, target, taps) -> None:
    state = context_of(drafter, taps, 9)
    one = drafter.draft(5, state, target, num_tokens=1)
    assert one.token_ids.shape == (1,) and one.probs.shape == (1, 64)
    single = random_drafter(dataclasses.replace(SMALL, block_size=1), 1)
    assert single.draft(5, context_of(single, taps, 9), target).token_ids.equal(one.token_ids)
    assert drafter.draft(5, state, target, num_tokens=12).token_ids.shape == (12,)
    # Later rows are seen by the first: a longer block is not a continuation of a shorter one.
    long = drafter.draft(5, state, target, temperature=1.0,
                         generator=torch.Generator().manual_seed(0))  # fmt: skip
    short = drafter.draft(5, state, target, temperature=1.0, num_tokens=1,
                          generator=torch.Generator().manual_seed(0))  # fmt: skip
    assert (long.probs[0] - short.probs[0]).abs().max() > 1e-6
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        drafter.draft(5, state, target, num_tokens=0)
    with pytest.raises(ValueError, match="temperature must be 0"):
        drafter.draft(5, state, target, temperature=-1.0)


def test_draft_works_before_any_token_is_verified(drafter, target) -> None:
    assert drafter.draft(0, drafter.new_state(), target).token_ids.shape == (7,)


def test_anchor_is_the_first_row_and_masks_are_the_rest(drafter, taps) -> None:
    class Watched(torch.nn.Embedding):
        def forward(self, ids):
            self.seen = ids.tolist()
            return super().forward(ids)

    target = random_model(MICRO, 0, dtype=F64)
    watched = Watched(64, 64, dtype=F64)
    watched.load_state_dict(target.model.embed_tokens.state_dict())
    target.model.embed_tokens = watched
    drafter.draft(5, context_of(drafter, taps, 9), target)
    assert watched.seen == [5] + [MICRO.pad_token_id] * 6


def test_markov_head_changes_the_second_token_by_the_first(drafter, target, taps) -> None:
    state = context_of(drafter, taps, 9)
    drafts = [
        drafter.draft(
            5, state, target, temperature=1.0, generator=torch.Generator().manual_seed(seed)
        )
        for seed in range(20)
    ]
    rows = drafts[0]
    other = next(draft for draft in drafts if draft.token_ids[0] != rows.token_ids[0])
    torch.testing.assert_close(rows.probs[0], other.probs[0])  # same anchor
    first, second = (draft.probs[1].log() for draft in (rows, other))
    bias = drafter.markov_head.bias(drafter.markov_head.markov_w1(torch.stack(
        [rows.token_ids[0], other.token_ids[0]])))  # fmt: skip
    shift = (first - second) - (bias[0] - bias[1])
    torch.testing.assert_close(shift, shift.mean().expand(64))  # equal up to the normalisation
    assert (rows.probs[1] - other.probs[1]).abs().max() > 1e-3


def test_sampling_follows_the_seed_and_returns_what_it_drew_from(drafter, target, taps) -> None:
    state = context_of(drafter, taps, 9)

    def sample(seed: int, temperature: float = 0.7):
        generator = torch.Generator().manual_seed(seed)
        return drafter.draft(5, state, target, temperature=temperature, generator=generator)

    one, same, other = sample(3), sample(3), sample(4)
    assert torch.equal(one.token_ids, same.token_ids) and torch.equal(one.probs, same.probs)
    assert not torch.equal(one.token_ids, other.token_ids)
    torch.testing.assert_close(one.probs.sum(-1), torch.ones(7, dtype=F64))
    # Temperature divides the logits of the first row, which all samples share.
    cold, hot = sample(3, 0.5).probs[0].log(), sample(3, 2.0).probs[0].log()
    torch.testing.assert_close(cold - cold.mean(), 4 * (hot - hot.mean()), rtol=0, atol=1e-10)
    assert torch.equal(sample(3, 1e-4).token_ids, drafter.draft(5, state, target).token_ids)


def test_confidence_reads_hidden_state_and_previous_token(drafter, target, taps) -> None:
    head, state = drafter.confidence_head, context_of(drafter, taps, 9)
    hidden = []
    hook = drafter.final_norm.register_forward_hook(lambda _m, _i, y: hidden.append(y))
    draft = drafter.draft(5, state, target)
    hook.remove()
    previous = torch.tensor([5, *draft.token_ids[:-1].tolist()])
    joined = torch.cat((hidden[0], drafter.markov_head.markov_w1.weight[previous]), -1)
    want = torch.sigmoid(joined @ head.proj.weight[0] + head.proj.bias)
    torch.testing.assert_close(draft.confidence, want)
    bare = random_drafter(dataclasses.replace(SMALL, confidence_head=False), 1)
    assert len(bare.state_dict()) == len(drafter.state_dict()) - 2
    assert bare.draft(5, context_of(bare, taps, 9), target).confidence is None


# -- drafting for a real target --------------------------------------------------------------------


@pytest.mark.parametrize("taught", [False, True])
@torch.inference_mode()
def test_output_is_plain_greedy_decoding(target, taught: bool) -> None:
    plain = target.generate(PROMPT, 48, stop_token_ids=())
    drafter = random_drafter(SMALL, 2)
    if taught:
        teach_bigrams(drafter, plain)
    run = Speculation(target, drafter, PROMPT)
    while len(run.output) < 48:
        run.step()
        # The last token is not verified yet, and both models have taken in all before it.
        assert run.state.num_tokens == run.context.num_tokens == len(PROMPT) + len(run.output) - 1
    assert run.output[:48] == plain
    if taught:  # or the test would say nothing about kept drafts
        assert max(run.accepted) >= 3 and len(set(run.accepted)) >= 3, run.accepted


@torch.inference_mode()
def test_every_kept_length_leaves_the_state_of_plain_decoding(target) -> None:
    """Seven drafts of which the first ``a`` are right: roll-back of KDA, MLA and the context."""
    prompt = torch.randint(0, 64, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    plain = target.generate(prompt, 9, stop_token_ids=())
    drafter = random_drafter(SMALL, 3)

    class Forced(Speculation):
        def propose(self):
            drafts = torch.tensor(plain[1:8])
            drafts[kept:] = (drafts[kept:] + 1) % 64
            return super().propose()._replace(token_ids=drafts)

    decoded = SequenceMixer(target.new_state())
    target(torch.tensor(prompt), decoded)
    context = drafter.new_state()
    for kept in range(8):
        run = Forced(target, drafter, prompt)
        run.step()
        assert run.accepted == [kept] and run.output == plain[: kept + 2]
        target(torch.tensor(plain[kept : kept + 1]), decoded)
        want = decoded.state
        assert run.state.num_tokens == want.num_tokens == len(prompt) + kept + 1
        for group in ("recurrent", "conv", "latent"):
            for layer_id, tensor in getattr(want, group).items():
                got = getattr(run.state, group)[layer_id]
                scale = tensor.abs().max().clamp(min=1.0)
                assert ((got - tensor).abs().max() / scale) < 1e-12, (kept, group, layer_id)
        context = run.context
    # What was kept by seven steps of one token is what one step of eight left in the drafter.
    taps = drafter.new_taps()
    target(torch.tensor(prompt + plain[:8]), SequenceMixer(target.new_state()), taps=taps)
    whole = drafter.new_state()
    drafter.write_context(taps, whole)
    for a, b in zip(context.latent, whole.latent, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@torch.inference_mode()
def test_without_roll_back_the_state_is_another(target) -> None:
    prompt, drafts = torch.arange(20), torch.arange(30, 38)
    states = []
    for count in (3, 8):
        mixer = SequenceMixer(target.new_state())
        target(prompt, mixer)
        target(drafts[:count], mixer)
        states.append(mixer.state)
    short, long = states
    last = MICRO.mla_layer_ids[-1]
    # MLA only has rows too many; what KDA has forgotten and corrected cannot be cut off.
    torch.testing.assert_close(long.latent[last][:23], short.latent[last], rtol=0, atol=1e-10)
    for layer_id in MICRO.kda_layer_ids:
        assert (long.recurrent[layer_id] - short.recurrent[layer_id]).abs().max() > 1e-3
        assert (long.conv[layer_id] - short.conv[layer_id]).abs().max() > 1e-3


# -- sampling end to end ---------------------------------------------------------------------------

DRAWS, TEMPERATURE, MARKOV_STRENGTH = 1000, 2.5, 6.0
RULES = {
    "standard": standard_rule,
    "block": block_rule,
    "bonus from the target alone": lambda ids, draft, target: standard_rule(
        ids, draft, target
    )._replace(next_token=target),
    "drafts always kept": lambda ids, draft, target: Rule(torch.ones(len(ids), dtype=F64), target),
    "as if drafted uniformly": lambda ids, draft, target: block_rule(
        ids, torch.full_like(draft, 1 / draft.shape[-1]), target
    ),
}


def _p_value(seen: torch.Tensor, want: torch.Tensor) -> float:
    common = want >= 5  # what is rarer is counted together
    seen, want = (torch.cat((x[common], x[~common].sum().view(1))) for x in (seen, want))
    kept = want > 0
    return float(stats.chisquare(seen[kept].numpy(), want[kept].numpy()).pvalue)


@pytest.fixture(scope="module")
def p_values() -> dict[str, float]:
    """Chi-squared p-value per rule: first token of the output, and first two, against the target.

    Drafter and target are real models over eight tokens; each rule verifies the same drafts.
    """
    config = dataclasses.replace(MICRO, vocab_size=8)
    target = random_model(config, 5, dtype=F64)
    shape = DSparkConfig.for_target(config, num_hidden_layers=1)
    drafter = random_drafter(dataclasses.replace(shape, block_size=2), 6)
    drafter.markov_head.markov_w2.weight.mul_(MARKOV_STRENGTH)  # far from what the target thinks
    prompt, anchor = torch.tensor([0, 5, 3]), 4
    with torch.inference_mode():
        mixer, taps = SequenceMixer(target.new_state()), drafter.new_taps()
        target(prompt, mixer, taps=taps)
        context = drafter.new_state()
        drafter.write_context(taps, context)
        law = {}
        for pair in itertools.product(range(8), repeat=2):
            logits = target(torch.tensor([anchor, *pair]), SequenceMixer(mixer.state.clone()))
            law[pair] = (logits / TEMPERATURE).softmax(-1)
        expected = torch.stack([
            law[pair][0, pair[0]] * law[pair][1, pair[1]] for pair in law
        ])  # fmt: skip
        assert expected.sum().item() == pytest.approx(1.0)
        generator = torch.Generator().manual_seed(7)
        counts = {name: torch.zeros(64, dtype=F64) for name in RULES}
        worked: dict[tuple[int, ...], dict[str, Rule]] = {}
        for _ in range(DRAWS):
            draft = drafter.draft(
                anchor, context, target, temperature=TEMPERATURE, generator=generator
            )
            ids = tuple(draft.token_ids.tolist())
            if ids not in worked:  # a draft determines both models' probabilities
                worked[ids] = {
                    name: make(draft.token_ids, draft.probs, law[ids])
                    for name, make in RULES.items()
                }
            for name, rule in worked[ids].items():
                tokens = verify(rule, draft.token_ids, generator)
                if len(tokens) == 1:  # the next step's work
                    row = law[(tokens[0], 0)][1]
                    tokens.append(int(torch.multinomial(row, 1, generator=generator)))
                counts[name][8 * tokens[0] + tokens[1]] += 1
    found = {}
    for name, count in counts.items():
        first = _p_value(count.view(8, 8).sum(1), expected.view(8, 8).sum(1) * DRAWS)
        found[name] = min(1.0, 2 * min(first, _p_value(count, expected * DRAWS)))
    return found


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_sampled_output_is_distributed_as_the_targets(p_values, rule: str) -> None:
    assert p_values[rule] > 1e-3, p_values


@pytest.mark.parametrize("rule", list(RULES)[2:])
def test_the_same_check_sees_a_wrong_rule(p_values, rule: str) -> None:
    assert p_values[rule] < 1e-6, p_values
