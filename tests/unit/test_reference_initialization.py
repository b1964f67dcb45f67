"""Random weights: repeatable, storable, and with every mechanism at work."""

from __future__ import annotations

import torch

from kimik3_lab.config import K3Config
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM, SequenceMixer
from kimik3_lab.tensors import checkpoint_tensors

torch.set_num_threads(1)
TINY = K3Config.tiny()


class Watcher(SequenceMixer):
    def __init__(self, model: K3ForCausalLM) -> None:
        super().__init__(model.new_state())
        self.gates: list[torch.Tensor] = []

    def kda(self, layer_id, q, k, v, g, beta):
        self.gates.append(g)
        return super().kda(layer_id, q, k, v, g, beta)


def test_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    one = random_model(K3Config.micro(), 5).state_dict()
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(after, torch.get_rng_state()), "the global generator was used"
    torch.manual_seed(2)
    wide = random_model(K3Config.micro(), 5, dtype=torch.float64).state_dict()
    other = random_model(K3Config.micro(), 6).state_dict()
    for name, value in one.items():
        assert torch.equal(value.double(), wide[name]), name
        assert not torch.equal(value, other[name]), name


def test_weights_lie_on_the_grid_of_their_type_on_disk() -> None:
    state = random_model(K3Config.micro(), 0).state_dict()
    exact = {}
    for spec in checkpoint_tensors(K3Config.micro(), prefix=""):
        value = state[spec.name]
        exact[spec.name] = torch.equal(value, value.bfloat16().float())
        assert exact[spec.name] or spec.dtype == "F32", spec.name
    assert not any(exact[s.name] for s in checkpoint_tensors(K3Config.micro(), prefix="")
                   if s.dtype == "F32")  # fmt: skip


@torch.inference_mode()
def test_every_mechanism_is_at_work() -> None:
    model = random_model(TINY, 0)
    loads = []
    for layer in model.model.layers[1:]:
        layer.block_sparse_moe.gate.register_forward_hook(
            lambda _, __, routing: loads.append(routing.expert_ids.flatten().bincount(minlength=32))
        )
    watcher = Watcher(model)
    token_ids = torch.randint(0, 2048, (200,), generator=torch.Generator().manual_seed(0))
    logits = model(token_ids, watcher)

    a_log = model.model.layers[0].self_attn.A_log
    assert (a_log[:3] > 0).all() and not a_log[3:].any()
    g = torch.stack(watcher.gates)
    for low, high in ((-5.0, -4.5), (-3.0, -2.0), (-0.1, -0.001)):
        assert ((g > low) & (g < high)).float().mean() > 0.02, (low, high)
    load = torch.stack(loads).sum(0)
    assert all(each.max() > 3 * each.float().median() / 2 for each in loads), "routing is even"
    assert (load > 0).all()
    probabilities = logits.softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1).mean()
    assert 4 < entropy < 7.2  # even would be ln 2048 = 7.62
    assert logits.argmax(-1).unique().numel() > 100


def test_greedy_output_depends_on_the_prompt() -> None:
    model = random_model(TINY, 0)
    outputs = [tuple(model.generate([0, t], 8, stop_token_ids=())) for t in range(300, 304)]
    assert len(set(outputs)) == 4
    assert all(len(set(output)) > 5 for output in outputs), "stuck on few tokens"
