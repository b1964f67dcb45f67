"""Where KDA states lie: columns, boundaries, roll-back, and what is refused."""

from __future__ import annotations

import pytest
import torch
from executor_world import micro_model
from torch import Tensor

from kimik3_lab.config import K3Config
from kimik3_lab.reference import kda
from kimik3_lab.reference.model import K3ForCausalLM, SequenceMixer
from kimik3_lab.serving import CacheConfig, Engine, Request, Scheduler, SchedulerConfig
from kimik3_lab.serving.executors import kda_records
from kimik3_lab.serving.executors.kda_states import Chunk, Commit, KdaStates
from kimik3_lab.serving.executors.paged_cache import PagedCache, StateMove
from kimik3_lab.serving.executors.step_parts import StateRows
from kimik3_lab.serving.executors.torch_executor import TorchExecutor

pytestmark = pytest.mark.usefixtures("one_thread")

MICRO = K3Config.micro()


@pytest.fixture(scope="module")
def model() -> K3ForCausalLM:
    return micro_model()


def numbered(cache: PagedCache) -> PagedCache:
    """Fill every row of states and windows with its own number, windows with columns too."""
    rows = torch.arange(cache.conv.shape[1], dtype=cache.conv.dtype)
    cache.recurrent.copy_(rows.view(1, -1, 1, 1, 1).expand_as(cache.recurrent))
    columns = torch.arange(cache.conv.shape[3]) / 10
    cache.conv.copy_((rows.view(1, -1, 1, 1) + columns).expand_as(cache.conv))
    return cache


def aligned(k: int = 0, **knobs: object) -> tuple[PagedCache, KdaStates]:
    config = CacheConfig(40, 8, **{"num_kda_groups": 1, "enable_prefix_caching": True, **knobs})
    cache = numbered(PagedCache(MICRO, config, 2, num_speculative_tokens=k, dtype=torch.float64))
    return cache, KdaStates(cache, config)


def state(cache: PagedCache, row: int) -> float:
    return float(cache.recurrent[0, row].unique())


def window(cache: PagedCache, row: int) -> list[float]:
    return [round(x, 1) for x in cache.conv[0, row, 0, : cache.history].tolist()]


# -- columns -------------------------------------------------------------------------------------


def test_a_request_that_begins_starts_from_zero_in_the_column_of_its_last_token() -> None:
    cache, states = aligned()
    states.begin("r", [[0, 0, 7]], 0)
    assert states.prepare([Chunk("r", 0, 20)]) == [(StateRows([7]),)]
    assert (state(cache, 7), window(cache, 7)) == (0.0, [0.0] * 3)
    assert cache.counters.kda_state_bytes_copied == 0


def test_a_state_moves_along_when_its_column_changes_and_stays_behind_at_the_boundary() -> None:
    cache, states = aligned()
    states.begin("r", [[0, 3]], 16)  # found: 16 tokens
    states.extend("r", [[5]])
    assert states.prepare([Chunk("r", 16, 17)]) == [(StateRows([5]),)]
    assert (state(cache, 5), window(cache, 5)) == (3.0, [3.0, 3.1, 3.2])
    assert state(cache, 3) == 3.0
    assert cache.counters.kda_state_bytes_copied == cache.recurrent[:, 0].nbytes
    states.finish("r", 17)
    before = cache.counters.snapshot()
    states.prepare([Chunk("r", 17, 18)])  # within the column nothing moves
    assert cache.counters == before


def test_a_chunk_that_exports_a_state_names_the_column_before_its_last() -> None:
    _, states = aligned(prefill_checkpoints="internal")
    states.begin("r", [[0, 4, 7]], 0)
    assert states.prepare([Chunk("r", 0, 21, 16)]) == [(StateRows([7], 1, 4),)]


def test_a_plan_that_does_not_go_on_where_the_state_is_is_refused() -> None:
    _, states = aligned()
    states.begin("r", [[0, 3, 4]], 16)
    with pytest.raises(RuntimeError, match="planned from token 17, its state has read 16"):
        states.prepare([Chunk("r", 17, 18)])


def test_nobody_starts_behind_tokens_without_a_kept_state() -> None:
    _, states = aligned(enable_prefix_caching=False)
    with pytest.raises(ValueError, match="to start at token 8"):
        states.begin("r", [[3]], 8)


# -- roll-back -----------------------------------------------------------------------------------


def test_the_next_step_starts_from_the_scratch_row_of_the_last_accepted_token() -> None:
    cache, states = aligned(3)
    states.begin("r", [[0, 3, 4, 5, 6]], 9)
    chunk = Chunk("r", 9, 13)
    assert states.prepare([chunk]) == [(StateRows([3, 4, 5, 6]),)]
    states.accept([(chunk, 3)])
    assert states.prepare([Chunk("r", 12, 16)]) == [(StateRows([3, 4, 5, 6], 3),)]
    assert cache.counters.kda_state_bytes_copied == 0  # a cursor moved, no state


def test_a_boundary_among_accepted_drafts_leaves_its_state_in_its_column() -> None:
    cache, states = aligned(3)
    states.begin("r", [[0, 3, 4, 5, 6, 7]], 13)
    chunk = Chunk("r", 13, 17)  # the column of token 17 is the third
    assert states.prepare([chunk]) == [(StateRows([4, 5, 6, 7]),)]
    numbered(cache)
    states.accept([(chunk, 4)])
    # After 16 tokens the state was in the third scratch row; its window begins two columns in.
    assert (state(cache, 3), window(cache, 3)) == (6.0, [4.2, 4.3, 4.4])
    assert states.prepare([Chunk("r", 17, 18)]) == [(StateRows([4, 5, 6, 7], 4),)]


def test_a_boundary_at_the_very_end_becomes_the_running_state() -> None:
    cache, states = aligned(3)
    states.begin("r", [[0, 3, 4, 5, 6]], 12)
    chunk = Chunk("r", 12, 16)
    states.prepare([chunk])
    numbered(cache)
    states.accept([(chunk, 4)])
    assert (state(cache, 3), window(cache, 3)) == (6.0, [3.3, 3.4, 3.5])
    states.extend("r", [[8]])
    states.prepare([Chunk("r", 16, 17)])
    assert state(cache, 4) == 6.0


def test_records_say_what_to_commit_and_where() -> None:
    _, states = aligned(3, speculative_states="records")
    states.begin("r", [[0, 3, 4]], 13)
    chunk = Chunk("r", 13, 17)
    assert states.prepare([chunk]) == [(StateRows([4]),)]
    assert states.accept([(chunk, 4)]) == [Commit(4, (4,), 3, (3,))]
    assert states.prepare([Chunk("r", 17, 18)]) == [(StateRows([4]),)]
    states.finish("r", 18)
    chunk = Chunk("r", 18, 22)
    states.prepare([chunk])
    assert states.accept([(chunk, 2)]) == [Commit(2, (4,), 0, (0,))]


@pytest.mark.parametrize("count", range(4))
def test_a_commit_equals_the_recurrence_over_the_accepted_tokens(count: int) -> None:
    generator = torch.Generator().manual_seed(count)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    q, k = kda.l2norm(rand(2, 2, 3, 2, 8) - 0.5)
    v, g, beta = rand(2, 3, 2, 4), -3 * rand(2, 3, 2, 8), rand(2, 3, 2)
    before = rand(2, 2, 8, 4)
    o, states, records = kda_records.verify(q, k, v, g, beta, before)
    expected, after = kda.recurrent(q, k, v, g, beta, before)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(states[:, -1], after)
    wanted = before if count == 0 else states[:, count - 1]
    torch.testing.assert_close(
        kda_records.commit(before, records, torch.tensor([count, 3])),
        torch.stack((wanted[0], after[1])),
    )


# -- the cache -----------------------------------------------------------------------------------


def test_layers_are_dealt_to_the_groups_in_turn() -> None:
    tiny = K3Config.tiny()  # nine KDA layers
    cache = PagedCache(tiny, CacheConfig(4, num_kda_groups=2), 1)
    layers = [cache.kda_layer(layer_id) for layer_id in tiny.kda_layer_ids]
    assert [layer.group for layer in layers] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert cache.recurrent.shape[:2] == (5, 4 + 1)  # one for the empty requests of a recorded step
    places = {(layer.group, layer.recurrent.data_ptr()) for layer in layers}
    assert len(places) == len(layers)


def test_states_change_places_in_one_move() -> None:
    cache, _ = aligned()
    cache.move_states([StateMove(3, 3, 0, 4), StateMove(4, 4, 0, 3)])
    assert (state(cache, 3), state(cache, 4)) == (4.0, 3.0)


def test_a_block_is_copied_as_what_it_is() -> None:
    cache, _ = aligned()
    cache.latent.copy_(torch.arange(40).view(1, 40, 1, 1).expand_as(cache.latent))
    cache.own(0, [5])
    cache.own(1, [6])
    cache.copy_blocks([(5, 8), (6, 9)])
    assert [float(cache.latent[0, i, 0, 0]) for i in (8, 9)] == [5.0, 9.0]
    assert [state(cache, i) for i in (8, 9)] == [8.0, 6.0]
    assert cache.counters.block_copies == 2
    with pytest.raises(RuntimeError, match="block 11 is to be copied"):
        cache.copy_blocks([(11, 12)])


@pytest.mark.parametrize("prefill_checkpoints", ["split", "internal"])
def test_the_kept_state_is_that_of_the_prefix(
    model: K3ForCausalLM, prefill_checkpoints: str
) -> None:
    """Bit for bit the place that a hash promises: state and window after 16 of 30 tokens."""
    prompt = [3 + (i * 7) % 60 for i in range(30)]
    config = CacheConfig(
        30,
        16,
        num_kda_groups=2,
        enable_prefix_caching=True,
        prefill_checkpoints=prefill_checkpoints,  # type: ignore[arg-type]
    )
    executor = TorchExecutor(model, config, 1)
    engine = Engine(Scheduler(SchedulerConfig(1, 64, 64), config), executor)
    engine.add_request(Request("r", prompt, max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    alone = model.new_state()
    with torch.inference_mode():
        model(torch.tensor(prompt[:16]), SequenceMixer(alone))
    pool = engine.scheduler.kv_cache_manager.block_pool
    kept = {group: list(blocks) for (_, group), blocks in pool._by_hash.items() if group}
    assert kept.keys() == {1, 2}
    for layer_id in model.config.kda_layer_ids:
        layer = executor.cache.kda_layer(layer_id)
        (block_id,) = kept[1 + layer.group]
        torch.testing.assert_close(
            kda.from_cache_layout(layer.recurrent[block_id]), alone.recurrent[layer_id]
        )
        torch.testing.assert_close(layer.conv[block_id], alone.conv[layer_id])
