"""Drafts for many requests from pages: those of the reference, whatever lies around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from drafter_support import random_drafter

from kimik3_lab.config import K3Config
from kimik3_lab.drafter_config import DSparkConfig
from kimik3_lab.paths import default_model_dir
from kimik3_lab.reference.drafter import DSparkDrafter
from kimik3_lab.reference.initialization import random_model
from kimik3_lab.reference.model import K3ForCausalLM
from kimik3_lab.reference.state import SequenceMixer
from kimik3_lab.serving.config import CacheConfig
from kimik3_lab.serving.executors import draft_attention, sampler
from kimik3_lab.serving.executors.drafts import Draft, DraftRequest
from kimik3_lab.serving.executors.proposer import Proposer
from kimik3_lab.serving.executors.random_stream import RandomStream
from kimik3_lab.serving.request import SamplingParams

BLOCK = 4
CACHE = CacheConfig(num_blocks=32, block_size=BLOCK)
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def target() -> K3ForCausalLM:
    return random_model(K3Config.micro(), seed=0, dtype=torch.float64)


@pytest.fixture(scope="module")
def drafter(target: K3ForCausalLM) -> DSparkDrafter:
    return random_drafter(DSparkConfig.for_target(target.config), seed=1)


def text(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (length,), generator=generator).tolist()


def taps_of(target: K3ForCausalLM, drafter: DSparkDrafter, tokens: Sequence[int]):
    taps = drafter.new_taps()
    target(torch.tensor(tokens), SequenceMixer(target.new_state()), taps=taps)
    return taps


def values(draft: Draft):
    """Token ids and confidences: the latter tell a context from nearly the same context."""
    return pytest.approx([*draft.token_ids, *draft.confidence], abs=1e-9)


def expected(target, drafter, tokens: Sequence[int], anchor: int, count: int = 7) -> list[float]:
    """What the reference drafts behind ``tokens``."""
    state = drafter.new_state()
    drafter.write_context(taps_of(target, drafter, tokens), state)
    draft = drafter.draft(anchor, state, target, num_tokens=count)
    return [*draft.token_ids.tolist(), *draft.confidence.tolist()]


def cells_of(blocks: Sequence[int], start: int, stop: int) -> torch.Tensor:
    return torch.tensor([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(start, stop)])


def write(proposer: Proposer, tokens: Sequence[int], blocks: Sequence[int], start: int = 0) -> None:
    """Write the rows of ``tokens`` from ``start`` on, as a step that computes those does."""
    taps = taps_of(proposer.target, proposer.drafter, tokens)
    part = {layer: tap[start:] for layer, tap in taps.items()}
    positions = torch.arange(start, len(tokens))
    proposer.write(part, positions, cells_of(blocks, start, len(tokens)))


def ask(proposer: Proposer, tokens: Sequence[int], anchor: int, blocks: Sequence[int]):
    request = DraftRequest("r", anchor, len(tokens), blocks, GREEDY)
    return values(proposer.propose([request])["r"])


def test_many_requests_in_one_forward(target, drafter) -> None:
    proposer = Proposer(drafter, target, 7, CACHE)
    # Contexts of all lengths, in blocks that lie anywhere, in no order.
    texts = {"a": text(1, 9), "b": text(2, 1), "c": text(3, 16), "d": text(4, 3)}
    blocks = {"a": [7, 2, 30], "b": [31], "c": [5, 6, 1, 9], "d": [20]}
    for name, tokens in texts.items():
        write(proposer, tokens, blocks[name])
    drafts = proposer.propose(
        [DraftRequest(name, 11 + i, len(texts[name]), blocks[name], GREEDY)
         for i, name in enumerate(texts)]
    )  # fmt: skip
    assert proposer.num_forwards == 1
    assert list(drafts) == list(texts)
    for i, (name, tokens) in enumerate(texts.items()):
        assert values(drafts[name]) == expected(target, drafter, tokens, 11 + i)
        assert drafts[name].probs is None


def test_one_write_serves_a_mixed_step(target, drafter) -> None:
    """Rows of several requests, chunk and decode, come in one call."""
    proposer = Proposer(drafter, target, 3, CACHE)
    first, second = text(1, 10), text(2, 6)
    write(proposer, first[:9], [3, 4, 5])
    taps = [taps_of(target, drafter, tokens) for tokens in (first, second)]
    both = {layer: torch.cat((taps[0][layer][9:], taps[1][layer])) for layer in taps[0]}
    proposer.write(
        both,
        torch.tensor([9, *range(6)]),
        torch.cat((cells_of([3, 4, 5], 9, 10), cells_of([6, 7], 0, 6))),
    )
    assert ask(proposer, first, 8, [3, 4, 5]) == expected(target, drafter, first, 8, 3)
    assert ask(proposer, second, 9, [6, 7]) == expected(target, drafter, second, 9, 3)


def test_attention_in_groups_gives_the_same_drafts(target, drafter, monkeypatch) -> None:
    proposer = Proposer(drafter, target, 5, CACHE)
    requests = []
    for i, length in enumerate([8, 3, 5, 8]):
        tokens, blocks = text(i, length), [1 + 2 * i, 2 + 2 * i]
        write(proposer, tokens, blocks)
        requests.append(DraftRequest(str(i), 4 + i, length, blocks, GREEDY))
    whole = {name: draft.token_ids for name, draft in proposer.propose(requests).items()}
    groups = []
    original = draft_attention.group_contexts

    def small(*arguments):
        groups.append(original(*arguments, max_rows=10))
        return groups[-1]

    monkeypatch.setattr("kimik3_lab.serving.executors.proposer.group_contexts", small)
    grouped = proposer.propose(requests)
    assert {name: draft.token_ids for name, draft in grouped.items()} == whole
    assert [(g.requests.start, g.requests.stop) for g in groups[0]] == [(0, 2), (2, 3), (3, 4)]


def test_rejected_rows_are_overwritten(target, drafter) -> None:
    proposer = Proposer(drafter, target, 4, CACHE)
    blocks = [9, 3, 12]
    prompt = text(5, 6)
    write(proposer, prompt, blocks)
    # A verification of four drafts, of which one is kept: all five rows are written.
    anchor, drafts = 17, [21, 22, 23, 24]
    write(proposer, [*prompt, anchor, *drafts], blocks, start=6)
    kept = [*prompt, anchor, 21]
    assert ask(proposer, kept, 40, blocks) == expected(target, drafter, kept, 40, 4)
    # And again from there, with other tokens in the places of the rejected ones.
    longer = [*kept, 40, 41, 42]
    write(proposer, longer, blocks, start=8)
    assert ask(proposer, longer, 43, blocks) == expected(target, drafter, longer, 43, 4)


def test_a_prefix_hit_finds_the_rows_of_skipped_tokens(target, drafter) -> None:
    proposer = Proposer(drafter, target, 7, CACHE)
    shared = text(6, 8)
    write(proposer, [*shared, *text(7, 3)], [4, 8, 15])
    tokens = [*shared, *text(8, 4)]
    write(proposer, tokens, [4, 8, 16], start=8)  # the first two blocks were found in the cache
    assert ask(proposer, tokens, 33, [4, 8, 16]) == expected(target, drafter, tokens, 33)


def test_a_copied_block_takes_its_rows_along(target, drafter) -> None:
    proposer = Proposer(drafter, target, 7, CACHE)
    shared = text(6, 6)
    write(proposer, [*shared, *text(7, 2)], [4, 8])
    # The hit ends inside a block, which is copied to be continued; and the copy is copied again.
    proposer.copy_blocks([(8, 10), (10, 12)])
    for blocks, seed in ([4, 10, 11], 8), ([4, 12, 13], 9):
        tokens = [*shared, *text(seed, 4)]
        write(proposer, tokens, blocks, start=6)
        assert ask(proposer, tokens, 33, blocks) == expected(target, drafter, tokens, 33)
    first = [*shared, *text(7, 2)]
    assert ask(proposer, first, 33, [4, 8]) == expected(target, drafter, first, 33)


def test_a_preempted_request_is_drafted_for_from_its_new_blocks(target, drafter) -> None:
    proposer = Proposer(drafter, target, 7, CACHE)
    tokens, others = text(9, 7), text(10, 8)
    write(proposer, tokens, [2, 3])
    write(proposer, others, [3, 2])  # preempted: another request has its blocks
    write(proposer, tokens[:5], [6, 5])  # it comes back, in chunks
    write(proposer, tokens, [6, 5], start=5)
    assert ask(proposer, tokens, 13, [6, 5]) == expected(target, drafter, tokens, 13)


def test_memory_does_not_grow(target, drafter) -> None:
    proposer = Proposer(drafter, target, 3, CACHE)
    before = proposer.nbytes
    for i in range(5):
        write(proposer, text(i, 12), [1 + 3 * i, 2 + 3 * i, 3 + 3 * i])
        ask(proposer, text(i, 12), 5, [1 + 3 * i, 2 + 3 * i, 3 + 3 * i])
    config = drafter.config
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert proposer.nbytes == before == config.num_hidden_layers * 32 * BLOCK * width * 8
    assert not proposer.latent[:, 0].any()


def test_rows_of_the_null_block_are_not_written(target, drafter) -> None:
    proposer = Proposer(drafter, target, 3, CACHE)
    tokens = text(1, 5)
    taps = taps_of(target, drafter, tokens)
    padded = {layer: torch.cat((tap, torch.full_like(tap[:2], torch.nan)))
              for layer, tap in taps.items()}  # fmt: skip
    cells = torch.cat((cells_of([1, 2], 0, 5), torch.tensor([0, 3])))
    proposer.write(padded, torch.tensor([*range(5), 0, 0]), cells)
    assert not proposer.latent[:, 0].any()
    assert ask(proposer, tokens, 5, [1, 2]) == expected(target, drafter, tokens, 5, 3)


# -- drawn drafts ------------------------------------------------------------------------------


def test_a_drawn_draft_carries_what_it_was_drawn_from(target, drafter) -> None:
    """The Markov loop is replayed with the reference's parts, on the tokens that were drawn."""
    proposer = Proposer(drafter, target, 5, CACHE, draft_sample_method="probabilistic")
    tokens, params = text(3, 6), SamplingParams(temperature=0.7, top_p=0.5, seed=3)
    write(proposer, tokens, [1, 2])
    request = DraftRequest("r", 9, 6, [1, 2], params, RandomStream(3))
    draft = proposer.propose([request])["r"]

    state = drafter.new_state()
    drafter.write_context(taps_of(target, drafter, tokens), state)
    seen = []
    original = drafter._sample_in_order

    def catch(anchor, hidden, base, temperature, generator):
        seen.append(base)
        return original(anchor, hidden, base, temperature, generator)

    drafter._sample_in_order = catch
    try:
        drafter.draft(9, state, target, num_tokens=5)
    finally:
        del drafter._sample_in_order
    for place, before in enumerate([9, *draft.token_ids[:-1]]):
        embedding = drafter.markov_head.markov_w1(torch.tensor(before))
        logits = seen[0][place] + drafter.markov_head.bias(embedding)
        # vLLM's rule: the temperature alone.
        assert torch.allclose(draft.probs[place], (logits / 0.7).softmax(-1), atol=1e-9)
    assert len(draft.confidence) == 5


def test_truncated_drafts_stay_inside_the_nucleus(target, drafter) -> None:
    settings = {"draft_sample_method": "probabilistic", "truncate_drafts": True}
    proposer = Proposer(drafter, target, 5, CACHE, **settings)
    write(proposer, text(3, 6), [1, 2])
    params = SamplingParams(temperature=1.0, top_k=3)
    draft = proposer.propose([DraftRequest("r", 9, 6, [1, 2], params, RandomStream(3))])["r"]
    assert ((draft.probs > 0).sum(-1) == 3).all()
    assert all(draft.probs[i, token] > 0 for i, token in enumerate(draft.token_ids))


@pytest.mark.parametrize("shared", [False, True])
def test_a_seed_repeats_its_draft_in_any_company(target, drafter, shared: bool) -> None:
    settings = {"draft_sample_method": "probabilistic", "shared_noise": shared}
    proposer = Proposer(drafter, target, 5, CACHE, **settings)
    requests = []
    for i, length in enumerate([6, 2, 7]):
        tokens, blocks = text(i, length), [1 + 2 * i, 2 + 2 * i]
        write(proposer, tokens, blocks)
        params = GREEDY if i == 1 else SamplingParams(temperature=2.0, seed=i)
        stream = RandomStream.for_request(params)
        requests.append(DraftRequest(str(i), 9, length, blocks, params, stream))
    together = proposer.propose(requests)
    again = proposer.propose(requests[::-1])
    for request in requests:
        alone = proposer.propose([request])[request.req_id]
        assert alone.token_ids == together[request.req_id].token_ids
        assert again[request.req_id].token_ids == alone.token_ids
    assert together["1"].probs is None
    assert together["0"].token_ids != together["2"].token_ids


def test_shared_noise_is_that_of_the_token_s_own_position(target, drafter) -> None:
    """The anchor stands at position 6, so the draft begins at 7: there the target will draw."""
    settings = {"draft_sample_method": "probabilistic", "shared_noise": True}
    proposer = Proposer(drafter, target, 5, CACHE, **settings)
    write(proposer, text(3, 6), [1, 2])
    stream, params = RandomStream(3), SamplingParams(temperature=2.0)
    draft = proposer.propose([DraftRequest("r", 9, 6, [1, 2], params, stream)])["r"]
    for place, token in enumerate(draft.token_ids):
        assert sampler.draw(draft.probs[place : place + 1], [stream], [7 + place]) == [token]


def test_drafts_are_drawn_from_their_distribution(target, drafter) -> None:
    settings = {"draft_sample_method": "probabilistic"}
    proposer = Proposer(drafter, target, 1, CACHE, **settings)
    write(proposer, text(3, 6), [1, 2])
    params = SamplingParams(temperature=1.0)
    drafts = proposer.propose(
        [DraftRequest(str(i), 9, 6, [1, 2], params, RandomStream(i)) for i in range(600)]
    )
    probs = drafts["0"].probs[0]
    counts = torch.tensor([d.token_ids[0] for d in drafts.values()]).bincount(minlength=64)
    deviation = (counts - 600 * probs) / (600 * probs * (1 - probs)).sqrt()
    assert deviation[600 * probs > 5].abs().max() < 4.5


# -- the trained pair --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_trained_drafter_keeps_what_the_reference_loop_keeps() -> None:
    from kimik3_lab.reference import checkpoint, drafter_checkpoint
    from kimik3_lab.reference.evaluation import generate_with_drafts
    from kimik3_lab.reference.speculative import verify_greedy

    folder = default_model_dir()
    target = checkpoint.load(folder, dtype=torch.float32)
    drafter = drafter_checkpoint.load(folder / "drafter")
    prompt = [0, 100, 200, 300, 400]
    made = generate_with_drafts(target, drafter, prompt, 24)
    cache = CacheConfig(num_blocks=8, block_size=16)
    proposer, blocks = Proposer(drafter, target, 7, cache), [5, 2, 7, 1]
    tokens, accepted = list(prompt), []

    def score(start: int, new: Sequence[int]) -> torch.Tensor:
        # The whole text each time: the state of the target is not what is tested.
        taps = proposer.new_taps()
        step = torch.tensor([*tokens[:start], *new])
        logits = target(step, SequenceMixer(target.new_state()), taps=taps)
        cells = torch.tensor([blocks[p // 16] * 16 + p % 16 for p in range(start, len(step))])
        rows = {layer: tap[start:] for layer, tap in taps.items()}
        proposer.write(rows, torch.arange(start, len(step)), cells)
        return logits[start:]

    with torch.inference_mode():
        tokens.append(int(score(0, prompt)[-1].argmax()))
        while len(accepted) < len(made.accepted):
            known = len(tokens)
            request = DraftRequest("r", tokens[-1], known - 1, blocks, GREEDY)
            draft = proposer.propose([request])["r"].token_ids
            logits = score(known - 1, [tokens[-1], *draft])
            new = verify_greedy(torch.tensor(draft), logits)
            accepted.append(len(new) - 1)
            tokens += new
    assert accepted == made.accepted
    assert tokens[len(prompt) :][: len(made.token_ids)] == made.token_ids
    assert proposer.num_forwards == len(accepted)


# -- what it refuses ---------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(target, drafter) -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Proposer(drafter, target, 0, CACHE)
    with pytest.raises(ValueError, match="draft_sample_method must be one of"):
        Proposer(drafter, target, 3, CACHE, draft_sample_method="best")
    other = random_model(dataclasses.replace(K3Config.micro(), vocab_size=80), seed=0)
    with pytest.raises(ValueError, match="target with vocab_size=64, this one has 80"):
        Proposer(drafter, other, 3, CACHE)
    proposer = Proposer(drafter, target, 3, CACHE)
    taps = taps_of(target, drafter, [1, 2, 3])
    with pytest.raises(ValueError, match="do not fit"):
        proposer.write(taps, torch.arange(2), torch.arange(4, 6))
    with pytest.raises(ValueError, match="do not fit"):
        proposer.write(proposer.new_taps(), torch.arange(3), torch.arange(4, 7))
    for num_context in (0, 5):
        with pytest.raises(ValueError, match=f"context of {num_context} tokens"):
            proposer.propose([DraftRequest("r", 3, num_context, [1], GREEDY)])
    drawing = Proposer(drafter, target, 3, CACHE, draft_sample_method="probabilistic")
    with pytest.raises(ValueError, match="no random stream"):
        drawing.propose([DraftRequest("r", 3, 1, [1], SamplingParams(temperature=1.0))])
    assert proposer.propose([]) == {}
