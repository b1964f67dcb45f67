"""The DSpark drafter against AutoModel's, vLLM's parts of it, and transformers' YaRN."""

import functools

import pytest
import torch
from golden_cases import Golden, error, load, names

from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.reference import drafter_layers, mla
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.norms import rms_norm
from kimik3_lab.reference.rope import rotate, yarn_attention_factor, yarn_frequencies

#: measured: 6e-7 for a layer, 4e-7 for a whole drafted block, 2e-7 for frequencies
ROUNDING, BLOCK_ROUNDING = 2e-6, 3e-6
#: their names of our modules
RENAMED = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
TARGET = ("embed_tokens.weight", "lm_head.weight")


# -- a whole drafter: taps in, drafted block out ---------------------------------------------------


class Target(torch.nn.Module):
    """What the drafter borrows from the target: embedding and output head."""

    def __init__(self, case: Golden) -> None:
        super().__init__()
        embedding, head = case.given(*TARGET)
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding.from_pretrained(embedding)
        self.lm_head = torch.nn.Linear(*head.shape[::-1], bias=False)
        self.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)


def recorded_config(case: Golden, **changes) -> DSparkConfig:
    shape, rope = case.params["shape"], case.params["rope"]
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank",
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps",
        "mask_token_id", "block_size", "markov_rank",
    )  # fmt: skip
    values = {name: shape[name] for name in same} | {
        "target_hidden_size": shape["hidden_size"],
        "intermediate_size": shape["moe_intermediate_size"],
        "target_layer_ids": tuple(shape["target_layer_ids"]),
        "rope_theta": rope["rope_theta"],
        "rope_factor": rope.get("factor", 1.0),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings", 4096),
    }
    return DSparkConfig(**(values | changes))


def recorded_drafter(case: Golden, **changes) -> DSparkDrafter:
    drafter = DSparkDrafter(recorded_config(case, **changes), dtype=torch.float64)
    weights = {}
    for name, tensor in case.inputs.items():
        if name in (*TARGET, "taps", "token_ids"):
            continue
        theirs = next((old for old in RENAMED if name.startswith(old)), "")
        weights[RENAMED.get(theirs, "") + name.removeprefix(theirs)] = tensor.double()
    drafter.load_state_dict(weights)
    return drafter.requires_grad_(False)


def draft(case: Golden, drafter: DSparkDrafter, rows: int | None = None):
    """Draft after the recorded anchor; also the corrected logits and what layers put out."""
    ids, anchor = drafter.config.target_layer_ids, case.params["anchor"]
    state = drafter.new_state()
    taps = dict(zip(ids, case.given("taps")[0], strict=True))
    drafter.write_context(taps, state, anchor if rows is None else rows)
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        drafter.final_norm.register_forward_hook(lambda _m, _i, y: seen.__setitem__("hidden", y)),
        drafter.layers[0].register_forward_hook(lambda _m, _i, y: seen.__setitem__("layer", y)),
        drafter.layers[0].self_attn.register_forward_hook(
            lambda _m, _i, y: seen.__setitem__("attention", y)
        ),
    ]
    target, given = Target(case), int(case.inputs["token_ids"][anchor])
    drafted = drafter.draft(given, state, target)
    for hook in hooks:
        hook.remove()
    previous = [given, *drafted.token_ids.tolist()[:-1]]
    base = seen["hidden"] @ target.lm_head.weight.mT
    embeddings = drafter.markov_head.markov_w1(torch.tensor(previous))
    logits = base + drafter.markov_head.bias(embeddings)
    return drafted, seen | {"base_logits": base, "logits": logits}, state


CASES = names("automodel_dspark")


@pytest.mark.parametrize("name", CASES)
def test_drafted_block_matches_automodel(name):
    case = load("automodel_dspark")[name]
    drafted, seen, state = draft(case, recorded_drafter(case))
    for label in ("attention", "layer"):
        assert error(seen[label], case.outputs[label]) < ROUNDING, label
    for label in ("hidden", "base_logits", "logits"):
        assert error(seen[label], case.outputs[label]) < BLOCK_ROUNDING, label
    assert torch.equal(drafted.token_ids, case.outputs["token_ids"])
    assert error(drafted.confidence, case.outputs["confidence"]) < BLOCK_ROUNDING
    assert drafted.probs.argmax(-1).equal(drafted.token_ids)
    # the normed latents of context and block, before what of the key is rotated
    anchor, rank = case.params["anchor"], case.params["shape"]["kv_lora_rank"]
    assert error(state.latent[0][:, :rank], case.outputs["latent"][:anchor]) < ROUNDING


@pytest.mark.parametrize("name", CASES)
def test_block_starts_where_the_recording_says(name):
    case = load("automodel_dspark")[name]
    positions, anchor = case.outputs["positions"].tolist(), case.params["anchor"]
    assert positions[-7:] == list(range(anchor, anchor + 7))


CONFIG_MISTAKES = {
    "positions not stretched": {"rope_factor": 1.0},
    "another base of the speeds": {"rope_theta": 50_000.0},
    "another trained context": {"original_max_position_embeddings": 4096},
    "another epsilon": {"rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("mistake", CONFIG_MISTAKES)
def test_fixture_catches_a_wrong_configuration(mistake):
    case = load("automodel_dspark")["yarn"]
    _, seen, _ = draft(case, recorded_drafter(case, **CONFIG_MISTAKES[mistake]))
    assert error(seen["hidden"], case.outputs["hidden"]) > 100 * BLOCK_ROUNDING


def _neighbours_apart(x, positions, frequencies):
    """Pairs (0, W/2), (1, W/2 + 1), ... in place of neighbours."""
    order = torch.arange(x.shape[-1]).view(2, -1).T.flatten()
    return rotate(x[..., order], positions, frequencies)[..., order.argsort()]


ROTATION_MISTAKES = {
    "nothing rotated": lambda x, *_: x,
    "halves in place of neighbouring pairs": _neighbours_apart,
    "q and k turned in opposite directions": lambda x, p, f: rotate(
        x, -p if x.dim() == 3 else p, f
    ),
    "positions of the block from 0": lambda x, p, f: rotate(x, p - p[0], f),
}


@pytest.mark.parametrize("mistake", ROTATION_MISTAKES)
def test_fixture_catches_a_wrong_rotation(mistake, monkeypatch):
    case = load("automodel_dspark")["yarn"]
    monkeypatch.setattr(drafter_layers, "rotate", ROTATION_MISTAKES[mistake])
    _, seen, _ = draft(case, recorded_drafter(case))
    assert error(seen["hidden"], case.outputs["hidden"]) > 100 * BLOCK_ROUNDING


def _no_attention_factor(drafter):
    for layer in drafter.layers:
        layer.self_attn.scale = (20) ** -0.5


def _causal(drafter):
    for layer in drafter.layers:
        attend = layer.self_attn

        def forward(x, positions, context, attend=attend):
            q = attend.q_b_proj(attend.q_a_layernorm(attend.q_a_proj(x))).unflatten(-1, (3, -1))
            q = torch.cat((q[..., :8], rotate(q[..., 8:], positions, attend.frequencies)), -1)
            rows = torch.cat((context, attend.latent(x, positions)))
            o = mla.absorbed(q, rows, attend.kv_b_proj.weight, scale=attend.scale, causal=True)
            return attend.o_proj(o.flatten(-2))

        attend.forward = forward


def _normed_twice(drafter):
    """The context goes through the layer's input norm, as the block's own rows do."""
    for layer in drafter.layers:
        latent = layer.self_attn.latent
        layer.self_attn.latent = lambda x, p, layer=layer, latent=latent: latent(
            layer.input_layernorm(x) if len(x) != 7 else x, p
        )


DRAFTER_MISTAKES = {
    "scores not sharpened": _no_attention_factor,
    "block attends causally": _causal,
    "input norm on the context": _normed_twice,
    "context not normed": lambda drafter: drafter.context_norm.weight.fill_(1.0),
}


@pytest.mark.parametrize("mistake", DRAFTER_MISTAKES)
def test_fixture_catches_a_wrong_drafter(mistake):
    case = load("automodel_dspark")["yarn"]
    drafter = recorded_drafter(case)
    DRAFTER_MISTAKES[mistake](drafter)
    _, seen, _ = draft(case, drafter)
    assert error(seen["hidden"], case.outputs["hidden"]) > 100 * BLOCK_ROUNDING


def test_fixture_catches_a_context_that_holds_the_anchor():
    case = load("automodel_dspark")["yarn"]
    _, seen, _ = draft(case, recorded_drafter(case), rows=case.params["anchor"] + 1)
    assert error(seen["hidden"], case.outputs["hidden"]) > 100 * BLOCK_ROUNDING


# -- positions -------------------------------------------------------------------------------------


def frequencies(params, **changes):
    values = params | changes
    return yarn_frequencies(values["width"], values["theta"], values["factor"], values["original"])


@functools.cache
def all_yarns():
    fixtures = ("transformers_rope", "vllm_dspark")
    return [
        pytest.param(case, id=f"{fixture}-{name}")
        for fixture in fixtures
        for name, case in load(fixture).items()
        if "frequencies" in case.outputs
    ]


@pytest.mark.parametrize("case", all_yarns())
def test_frequencies_match(case):
    ours, theirs = frequencies(case.params), case.outputs["frequencies"].double()
    assert ((ours - theirs) / theirs).abs().max() < ROUNDING  # each pair on its own scale


def test_recorded_ramp_has_pairs_of_all_three_kinds():
    case = load("transformers_rope")["released"]
    plain = frequencies(case.params, factor=1.0)
    ratio = case.outputs["frequencies"].double() / plain
    assert (ratio > 0.999).sum() >= 4 and (ratio < 0.04).sum() >= 4
    assert ((ratio > 0.04) & (ratio < 0.999)).sum() >= 4


YARN_MISTAKES = {
    "all pairs slowed": lambda params: frequencies(params, factor=1.0) / params["factor"],
    "no pair slowed": lambda params: frequencies(params, factor=1.0),
    "ramp over the served context": lambda params: frequencies(
        params, original=round(params["original"] * params["factor"])
    ),
    "ramp reversed": lambda params: (
        frequencies(params, factor=1.0) * (1 + 1 / params["factor"]) - frequencies(params)
    ),
}


@pytest.mark.parametrize("mistake", YARN_MISTAKES)
@pytest.mark.parametrize("name", ["released", "small"])
def test_fixture_catches_wrong_frequencies(name, mistake):
    case = load("transformers_rope")[name]
    theirs = case.outputs["frequencies"].double()
    wrong = YARN_MISTAKES[mistake](case.params)
    assert ((wrong - theirs) / theirs).abs().max() > 0.1


def test_attention_factor_matches_vllm_and_cosines_stay_unscaled():
    case = load("vllm_dspark")["rope_released"]
    assert yarn_attention_factor(32.0) == pytest.approx(
        float(case.outputs["attention_factor"]), rel=1e-7
    )
    assert all(c.outputs["cosine_factor"] == 1 for c in load("transformers_rope").values())


#: vLLM's angles are float32: their rounding grows with the position.
#: measured: 4e-5 up to 2,047, 4e-2 up to 1,048,575, 5e-6
ROTATIONS = {"rope_released": 2e-4, "rope_released_far": 1e-1, "rope_small": 2e-5}


@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("side", ["q", "k"])
def test_rotation_matches_vllm(name, side):
    case = load("vllm_dspark")[name]
    rotated = rotate(*case.given(side), case.inputs["positions"], frequencies(case.params))
    assert error(rotated, case.outputs[side]) < ROTATIONS[name]


@pytest.mark.parametrize("name", ["rope_released", "rope_small"])
def test_rotation_matches_vllm_to_rounding_near_the_start(name):
    case = load("vllm_dspark")[name]
    near = case.inputs["positions"] < 64
    rotated = rotate(case.given("q")[0], case.inputs["positions"], frequencies(case.params))
    assert error(rotated[near], case.outputs["q"][near]) < 4 * ROUNDING


def test_far_rotation_is_ours_up_to_the_rounding_of_their_angles():
    case = load("vllm_dspark")["rope_released_far"]
    positions = case.inputs["positions"]
    angles = positions.float().unsqueeze(-1) * case.outputs["frequencies"]
    table = torch.cat((angles.cos(), angles.sin()), -1)
    assert error(table, case.outputs["cos_sin"]) < 1e-6
    exact = positions.double().unsqueeze(-1) * frequencies(case.params)
    assert 0.01 < (exact - angles.double()).abs().max() < 0.1


# -- context rows and the Markov loop, as vLLM runs them -------------------------------------------


def test_context_rows_match_vllm():
    case = load("vllm_dspark")["context"]
    taps, project, weight, kv_a, norms = case.given(
        "taps", "context_proj", "context_norm", "kv_a_proj", "kv_a_layernorm"
    )
    params, positions = case.params, case.inputs["positions"]
    config = DSparkConfig(
        hidden_size=24,
        target_hidden_size=24,
        num_hidden_layers=2,
        vocab_size=40,
        mask_token_id=38,
        target_layer_ids=(0, 1, 2),
        kv_lora_rank=params["latent"],
        qk_rope_head_dim=params["width"],
        rope_theta=params["theta"],
        rope_factor=params["factor"],
        original_max_position_embeddings=params["original"],
        intermediate_size=8,
        num_attention_heads=1,
        q_lora_rank=4,
    )
    drafter = DSparkDrafter(config, dtype=torch.float64).requires_grad_(False)
    drafter.context_proj.weight.copy_(project)
    drafter.context_norm.weight.copy_(weight)
    for layer, rows, norm in zip(drafter.layers, kv_a, norms, strict=True):
        layer.self_attn.kv_a_proj_with_mqa.weight.copy_(rows)
        layer.self_attn.kv_a_layernorm.weight.copy_(norm)
    state = drafter.new_state()
    start = int(positions[0])
    state.latent = [rows.new_zeros(start, rows.shape[1]) for rows in state.latent]
    drafter.write_context(dict(enumerate(taps.unflatten(-1, (3, 24)).unbind(1))), state)
    assert error(torch.stack(state.latent)[:, start:], case.outputs["rows"]) < 4 * ROUNDING
    context = rms_norm(taps @ project.mT, weight, params["eps"])
    assert error(context, case.outputs["context"]) < ROUNDING
    # a tap order other than ascending is another context
    swapped = drafter.new_state()
    swapped.latent = [rows.new_zeros(start, rows.shape[1]) for rows in swapped.latent]
    drafter.write_context(dict(enumerate(taps.unflatten(-1, (3, 24)).flip(1).unbind(1))), swapped)
    assert error(torch.stack(swapped.latent)[:, start:], case.outputs["rows"]) > 0.1


def loop_case(change=None):
    """The drafter's own Markov loop on recorded final hidden states."""
    case = load("vllm_dspark")["loop"]
    hidden, head, w1, w2, weight, bias = case.given(
        "hidden", "lm_head", "markov_w1", "markov_w2", "confidence_weight", "confidence_bias"
    )
    vocab, rank = w1.shape
    config = DSparkConfig(
        hidden_size=hidden.shape[1], target_hidden_size=hidden.shape[1], num_hidden_layers=1,
        vocab_size=vocab, markov_rank=rank, mask_token_id=38, intermediate_size=4, q_lora_rank=4,
        num_attention_heads=1,
    )  # fmt: skip
    drafter = DSparkDrafter(config, dtype=torch.float64).requires_grad_(False)
    drafter.markov_head.markov_w1.weight.copy_(w1)
    drafter.markov_head.markov_w2.weight.copy_(w2)
    drafter.confidence_head.proj.weight.copy_(weight)
    drafter.confidence_head.proj.bias.copy_(bias)
    if change:
        change(drafter)
    blocks = hidden.view(len(case.inputs["anchor"]), -1, hidden.shape[1])
    return case, [
        drafter._sample_in_order(int(anchor), rows, rows @ head.mT, 0.0, None)
        for anchor, rows in zip(case.inputs["anchor"], blocks, strict=True)
    ]


def test_markov_loop_matches_vllm():
    case, drafts = loop_case()
    assert torch.equal(torch.stack([d.token_ids for d in drafts]), case.outputs["token_ids"])
    confidence = torch.stack([d.confidence for d in drafts])
    assert error(confidence, case.outputs["confidence"]) < ROUNDING


LOOP_MISTAKES = {
    "no Markov bias": lambda drafter: drafter.markov_head.markov_w2.weight.zero_(),
    "factors swapped": lambda drafter: drafter.markov_head.load_state_dict(
        {
            "markov_w1.weight": drafter.markov_head.markov_w2.weight.clone(),
            "markov_w2.weight": drafter.markov_head.markov_w1.weight.clone(),
        }
    ),
}


@pytest.mark.parametrize("mistake", LOOP_MISTAKES)
def test_fixture_catches_a_wrong_markov_head(mistake):
    case, drafts = loop_case(LOOP_MISTAKES[mistake])
    assert not torch.equal(torch.stack([d.token_ids for d in drafts]), case.outputs["token_ids"])


def test_fixture_catches_a_confidence_without_the_markov_part():
    def blind(drafter):
        drafter.confidence_head.proj.weight[:, drafter.config.hidden_size :] = 0

    case, drafts = loop_case(blind)
    confidence = torch.stack([d.confidence for d in drafts])
    assert error(confidence, case.outputs["confidence"]) > 0.01
