"""Deployments: every one is a command that its release takes, or a refusal that names one."""

from __future__ import annotations

import itertools
import json
import shlex

import pytest
from pydantic import ValidationError

from kimik3_lab.config import K3Config
from kimik3_lab.deploy import layouts, memory, rules
from kimik3_lab.deploy.command import Deployment, Option, first_release
from kimik3_lab.deploy.flags import check_command, load_release, releases
from kimik3_lab.deploy.machines import MACHINES
from kimik3_lab.deploy.plan import plan, refusal
from kimik3_lab.deploy.spec import (
    HARDWARE,
    STRATEGIES,
    WORKLOADS,
    DeploymentSpec,
    RefusedError,
)
from kimik3_lab.deploy.workloads import PROFILES
from kimik3_lab.paths import data_dir
from kimik3_lab.performance.parallelism import Parallelism
from kimik3_lab.performance.placement import LayoutError

#: The command of the vLLM blog post of 2026-09-13, as it was printed.
PUBLISHED = shlex.split(
    "moonshotai/Kimi-K3 --trust-remote-code --tensor-parallel-size 8 --load-format fastsafetensors "
    "--gpu-memory-utilization 0.9 --reasoning-parser kimi_k3 --enable-auto-tool-choice "
    "--tool-call-parser kimi_k3 --host 0.0.0.0 --port 30000 --max-model-len auto "
    "--no-enable-prefix-caching --speculative-config "
    '\'{"model":"RedHatAI/Kimi-K3-speculator.dspark","method":"dspark","num_speculative_tokens":8,'
    '"draft_sample_method":"probabilistic","rejection_sample_method":"standard"}\''
)


def deploy(**wanted: object) -> Deployment:
    return plan(DeploymentSpec(**wanted))


def refused(**wanted: object) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        deploy(**wanted)
    return caught.value


def words(deployment: Deployment, node: int = 0) -> str:
    return " ".join(deployment.nodes[node].arguments())


@pytest.mark.parametrize("version", releases())
def test_everything_is_a_command_or_a_refusal_with_a_way_out(version: str) -> None:
    planned = 0
    for hardware, nodes, strategy, spec in itertools.product(
        HARDWARE, (1, 2, 3, 4), STRATEGIES, ("none", "dspark")
    ):
        wanted = DeploymentSpec(
            vllm=version, hardware=hardware, nodes=nodes, strategy=strategy, spec=spec
        )
        try:
            found = plan(wanted)
        except RefusedError as error:
            assert error.refusal.reason and error.refusal.source
            assert error.refusal.alternative is not None, wanted
            assert refusal(error.refusal.alternative) is None, wanted
            continue
        planned += 1
        assert len(found.nodes) == nodes
        for node in found.nodes:
            assert check_command(version, node.arguments(), node.environment()) == []
    assert 50 < planned < 150


@pytest.mark.parametrize("version", releases())
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_is_a_command_of_every_release(version: str, workload: str) -> None:
    for defaults, spec, strategy in itertools.product(
        ("common", "release"), ("none", "dspark"), ("tep", "pd")
    ):
        found = deploy(
            vllm=version, nodes=2, workload=workload, defaults=defaults, spec=spec,
            strategy=strategy,
        )  # fmt: skip
        assert found.groups[0].sequences >= 1


def test_the_published_command_and_what_is_pinned_beside_it() -> None:
    found = deploy(vllm="0.27.1", spec="dspark", defaults="release")
    (node,) = found.nodes
    assert node.arguments() == [
        *PUBLISHED, "--max-num-seqs", "1024", "--max-num-batched-tokens", "8192",
    ]  # fmt: skip
    assert node.argv[:3] == ["vllm", "serve", "moonshotai/Kimi-K3"]
    assert node.environment() == {
        "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    }


def test_two_releases_compare_fairly() -> None:
    """With common defaults they differ in the spelling of one switch only."""
    old, new = (deploy(vllm=version, spec="dspark").nodes[0] for version in ("0.27.1", "0.33.0"))
    assert old.environment() == new.environment()
    assert "--no-enable-prefix-caching" in old.arguments()
    assert new.arguments() == [
        word.replace("--no-enable-prefix-caching", "--disable-prefix-caching")
        for word in old.arguments()
    ]


@pytest.mark.parametrize("version", releases())
def test_a_release_can_keep_its_own_defaults(version: str) -> None:
    """They were recorded from the wheels, see tools/record_vllm_defaults.py."""
    recorded = json.loads((data_dir() / "deploy" / "vllm_defaults.json").read_text())
    own = recorded["releases"][version]
    node = deploy(vllm=version, defaults="release").nodes[0]
    options = dict(itertools.pairwise(node.arguments()))
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        assert options[f"--{name.replace('_', '-')}"] == str(own["api_server"]["B300"][name])
    for variable in ("VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ENGINE_READY_TIMEOUT_S"):
        value = own["environment"][variable].strip("'")
        assert (node.environment()[variable] == value) == (
            variable != "VLLM_ENGINE_READY_TIMEOUT_S"
        )
    assert own["hybrid_prefix_caching"] == (version != "0.27.1")  # as the reason says


def test_states_are_thinned_out_where_they_are_found_again() -> None:
    def kept(version: str, spec: str) -> str:
        node = deploy(vllm=version, spec=spec, workload="agents").nodes[0]
        if "VLLM_PREFIX_CACHE_RETENTION_INTERVAL" in node.environment():
            return "variable"
        return "option" if "--prefix-cache-retention-interval" in node.arguments() else "all"

    assert [kept(v, "none") for v in releases()] == ["variable"] * 2 + ["option"] * 5
    assert [kept(v, "dspark") for v in releases()] == ["all"] * 3 + ["option"] * 4


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_weights_fit_where_a_plan_says_so(hardware: str, nodes: int) -> None:
    """Counted again from the checkpoint: what all GPUs hold is at least one whole copy."""
    for strategy in STRATEGIES:
        try:
            found = deploy(hardware=hardware, nodes=nodes, strategy=strategy)
        except RefusedError:
            continue
        memory_bytes = MACHINES[hardware].accelerator.memory_bytes
        for group in found.groups:
            gpus = group.gpus_per_node * len(group.nodes)
            assert group.memory["weights"] * gpus > 1_560_860_324_864
            assert group.memory["weights"] < memory_bytes
            assert group.memory["room"] > 0


def test_a_node_of_h200_or_b200_does_not_hold_the_weights() -> None:
    for hardware, strategy in (("h200", "tep"), ("b200", "tp")):
        said = refused(hardware=hardware)
        assert "206.0 GB of weights" in str(said)
        nearest = said.refusal.alternative
        assert (nearest.nodes, nearest.strategy) == (2, strategy)


def test_padded_experts_rule_out_tp16_on_h200() -> None:
    """192 columns of an expert become 256: 138.4 GB instead of 108.3."""
    assert "139.3 GB of weights" in str(refused(hardware="h200", nodes=2))
    assert deploy(hardware="h200", nodes=2, strategy="tep").groups[0].memory["weights"] < 110e9
    assert deploy(hardware="h200", nodes=2, strategy="tp-pp").groups[0].layout == "TP8 PP2"


def test_a_pipeline_takes_no_drafter_before_0_30() -> None:
    said = refused(vllm="0.29.0", nodes=2, strategy="tp-pp", spec="dspark")
    assert "50098" in said.refusal.source and "0.30.0" in said.refusal.reason
    assert said.refusal.alternative.vllm == "0.30.0"
    assert deploy(vllm="0.30.0", nodes=2, strategy="tp-pp", spec="dspark").nodes[1].rank == 1


def test_dcp_needs_a_release_a_divisor_and_an_8_bit_cache() -> None:
    assert refused(vllm="0.27.1", strategy="dcp").refusal.alternative.vllm == "0.28.0"
    said = refused(strategy="dcp", decode_context_parallel_size=3)
    assert "must divide tp=8" in said.refusal.reason
    assert said.refusal.alternative.decode_context_parallel_size == 4
    assert "8-bit cache" in str(refused(strategy="dcp", kv_cache_dtype="auto"))
    assert refused(vllm="0.28.0", strategy="dcp", spec="dspark").refusal.alternative is not None
    found = deploy(strategy="dcp", spec="dspark", workload="long-context")
    assert "--kv-cache-dtype fp8" in words(found) and "TOKENSPEED_MLA" in words(found)
    whole = deploy(strategy="tp", spec="dspark", workload="long-context", kv_cache_dtype="fp8")
    assert found.groups[0].sequences > whole.groups[0].sequences


def test_sizes_divide_heads_and_experts() -> None:
    assert "vocabulary" in str(refused(nodes=3))
    assert "96 KDA heads" in str(refused(nodes=8))
    assert "896 experts" in str(refused(nodes=3, strategy="dep"))
    assert deploy(nodes=7, strategy="dep").groups[0].layout == "TP1 DP56 EP56"
    with pytest.raises(LayoutError, match="stages"):
        layouts.check_layout(K3Config.released(), Parallelism(tp=1, pp=94))


def test_the_drafter_has_64_heads() -> None:
    """TP12 is stopped by the vocabulary already, so the rule is asked directly."""
    spec = DeploymentSpec(spec="dspark")
    group = layouts.Group("serve", 0, 1, Parallelism(tp=3))
    assert "64 heads" in rules.broken_rule(spec, group)[0]


def test_a_long_sequence_is_refused_with_its_bytes() -> None:
    said = refused(hardware="h200", nodes=2, strategy="tep", max_model_len=1_048_576)
    assert "1,048,576 tokens takes 29.0 GB, the longest that fits has 707," in str(said)


def test_copies_of_the_trunk_may_be_split_in_a_node() -> None:
    said = refused(hardware="h200", nodes=2, strategy="dep").refusal.alternative
    assert said.tensor_parallel_size == 8
    found = plan(said)
    assert found.groups[0].layout == "TP8 DP2 EP16"
    assert "--data-parallel-size-local 1" in words(found, 1)


def test_prefill_and_decode_get_nodes_of_their_own() -> None:
    found = deploy(nodes=3, strategy="pd", spec="dspark")
    assert [group.layout for group in found.groups] == ["TP8 EP8", "TP1 DP16 EP16"]
    assert '"kv_role":"kv_producer"' in words(found, 0)
    assert '"kv_role":"kv_consumer"' in words(found, 2)
    assert all(node.answers for node in found.nodes)
    assert found.router[-2:] == ("--worker-startup-timeout-secs", "3600")
    assert found.router.count("--decode") == 2 and found.router.count("--prefill") == 1
    assert [node.environment()["VLLM_NIXL_SIDE_CHANNEL_HOST"] for node in found.nodes] == [
        "192.0.2.1", "192.0.2.2", "192.0.2.3",
    ]  # fmt: skip
    assert refused(strategy="pd").refusal.alternative.nodes == 2
    assert deploy(nodes=4, strategy="pd", prefill_nodes=2).groups[0].layout == "TP16 EP16"


def test_decode_nodes_split_the_trunk_where_copies_do_not_fit() -> None:
    """A B200 cannot hold the trunk whole: 16 of them decode as TP16."""
    found = deploy(hardware="b200", nodes=4, strategy="pd")
    assert [group.layout for group in found.groups] == ["TP16 EP16", "TP16 EP16"]
    assert deploy(hardware="gb300", nodes=6, strategy="pd").groups[1].layout == "TP1 DP16 EP16"
    # The reason is what does not fit, not that one of the splits cannot be divided.
    few = refused(hardware="b200", nodes=3, strategy="pd").refusal
    assert "TP8 EP8 (decode) takes 214.0 GB" in few.reason
    assert few.alternative.nodes == 4


def test_the_match_unit_is_left_out_and_the_plan_says_why() -> None:
    """Found by the lab: it makes prompts pass more often, and can be wrong in 0.32.0 and 0.33.0."""
    for version, wrong in (("0.27.1", False), ("0.33.0", True)):
        found = deploy(vllm=version, workload="chat")
        assert "--prefix-match-unit" not in words(found, 0)
        notes = [note for note in found.notes if "--prefix-match-unit" in note]
        assert len(notes) == 1 and "three passes" in notes[0]
        assert any("wrong answers" in note for note in found.notes) == wrong
    assert not any("match-unit" in note for note in deploy(workload="published").notes)


def test_nodes_of_one_engine_differ_in_rank_and_head_alone() -> None:
    found = deploy(hardware="b200", nodes=2, hosts=("10.0.0.1", "10.0.0.2"))
    first, second = (node.arguments() for node in found.nodes)
    assert second == [
        *first[: first.index("--node-rank") + 1], "1",
        *first[first.index("--node-rank") + 2 :], "--headless",
    ]  # fmt: skip
    assert first[first.index("--master-addr") + 1] == "10.0.0.1"
    assert found.nodes[1].environment()["VLLM_HOST_IP"] == "10.0.0.2"


def test_data_parallel_nodes_start_where_the_one_before_ended() -> None:
    found = deploy(nodes=4, strategy="dep")
    assert "--data-parallel-start-rank" not in found.nodes[0].arguments()
    starts = [
        node.arguments()[node.arguments().index("--data-parallel-start-rank") + 1]
        for node in found.nodes[1:]
    ]
    assert starts == ["8", "16", "24"]


def test_ray_runs_one_command_for_all() -> None:
    found = deploy(hardware="b200", nodes=2, launcher="ray")
    assert found.nodes[0].arguments() == found.nodes[1].arguments()
    assert "--distributed-executor-backend ray" in words(found)
    assert "--nnodes" not in words(found) and "--headless" not in words(found)


def test_every_option_has_a_reason_and_a_first_release() -> None:
    seen: set[str] = set()
    for strategy, hardware, workload in itertools.product(STRATEGIES, HARDWARE, WORKLOADS):
        try:
            found = deploy(strategy=strategy, hardware=hardware, nodes=4, workload=workload)
        except RefusedError:
            continue
        for node in found.nodes:
            for option in node.options:
                seen.add(option.name)
                assert len(option.why) > 10 and option.source and option.since
            for variable in node.variables:
                assert len(variable.why) > 10 and variable.source
    assert len(seen) > 30
    assert first_release("--prefix-cache-retention-interval") == "0.29.0"
    with pytest.raises(ValueError, match="no recorded release"):
        first_release("--no-such-thing")


def test_more_drafts_leave_room_for_fewer_sequences() -> None:
    room = [
        deploy(spec="dspark", num_speculative_tokens=k).groups[0].sequences for k in (1, 4, 8, 16)
    ]
    assert room == sorted(room, reverse=True) and room[0] > 2 * room[-1]


def test_the_old_budget_leaves_room_for_prompts() -> None:
    """0.27.1 takes K - 1 slots for each of 1,024 sequences away, which 10 drafts would exhaust."""
    said = refused(vllm="0.27.1", spec="dspark", num_speculative_tokens=10, defaults="release")
    assert "sets 9 aside" in said.refusal.reason
    assert deploy(vllm="0.28.0", spec="dspark", num_speculative_tokens=32, defaults="release")
    assert deploy(vllm="0.27.1", spec="dspark", num_speculative_tokens=8, defaults="release")


def test_sequences_of_a_workload_are_those_that_fit() -> None:
    found = deploy(workload="agents", spec="dspark")
    spec = found.spec
    (group,) = layouts.groups(spec)
    fits = memory.memory(spec, group, "fp8").sequences(PROFILES["agents"].context)
    assert fits < PROFILES["agents"].max_num_seqs
    assert f"--max-num-seqs {fits}" in words(found)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"vllm": "0.26.0"}, "no options were recorded"),
        ({"hardware": "a100"}, "b300"),
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"hosts": ("a", "b")}, "2 hosts for 1 nodes"),
        ({"hosts": ("a;b",)}, "no host name"),
        ({"nodes": 2, "hosts": ("a", "a")}, "named twice"),
        ({"decode_context_parallel_size": 2}, "belongs to the strategy dcp"),
        ({"prefill_nodes": 1}, "belongs to the strategy pd"),
        ({"model": "--evil"}, "pattern"),
        ({"gpu_memory_utilization": 1.5}, "less than or equal to 1"),
        ({"max_model_len": 2_000_000}, "1048576"),
        ({"speculative": "dspark"}, "Extra inputs"),
    ],
)
def test_a_wrong_wish_is_named(wanted: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DeploymentSpec(**wanted)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("--kda-decode-backend", "auto", "no such option"),
        ("--tensor-paralel-size", "8", "did you mean"),
        ("--all2all-backend", "carrier_pigeon", "must be one of"),
        ("--speculative-config", '{"modell":"x"}', "has no field"),
        ("--speculative-config", "{", "is no JSON"),
        ("--max-num-batched-tokens", None, "needs a value"),
        ("--port", "1", "given twice"),
    ],
)
def test_a_wrong_option_never_becomes_a_command(name: str, value: str | None, said: str) -> None:
    """Mutants of a good command: one option added that 0.27.1 would not take."""
    found = deploy(vllm="0.27.1")
    node = found.nodes[0]
    kept = tuple(o for o in node.options if o.name != name or name == "--port")
    extra = Option(name=name, value=value, why="a mistake on purpose", source="this test")
    options = (extra, *kept)  # in front, where another option follows
    mutant = node.model_copy(update={"options": options})
    group = found.groups[0].model_copy(update={"nodes": (mutant,)})
    with pytest.raises(ValidationError, match=said):
        Deployment(spec=found.spec, groups=(group,))


def test_a_wrong_variable_never_becomes_a_command() -> None:
    found = deploy()
    node = found.nodes[0]
    wrong = node.variables[0].model_copy(update={"name": "VLLM_ENGINE_READY_TIMEOUT"})
    mutant = node.model_copy(update={"variables": (wrong,)})
    group = found.groups[0].model_copy(update={"nodes": (mutant,)})
    with pytest.raises(ValidationError, match="does not read this variable"):
        Deployment(spec=found.spec, groups=(group,))


def test_a_missing_node_is_seen() -> None:
    found = deploy(hardware="b200", nodes=2)
    group = found.groups[0].model_copy(update={"nodes": found.nodes[:1]})
    with pytest.raises(ValidationError, match="1 commands for 2 nodes"):
        Deployment(spec=found.spec, groups=(group,))


def test_spellings_follow_the_release() -> None:
    shown = "--disable-prefix-caching"
    for version in releases():
        assert (shown in words(deploy(vllm=version))) == (shown in load_release(version))
