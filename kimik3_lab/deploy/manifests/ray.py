"""``ray symmetric-run``: the same line on every node starts Ray, runs vLLM on the head, stops Ray.

Needs pydantic. Facts: https://blog.vllm.ai/2025/11/22/ray-symmetric-run.html. The command waits for
``--min-nodes`` nodes, runs what follows ``--`` on the node that holds ``--address``, and ends the
cluster with it.
"""

from __future__ import annotations

import itertools

from pydantic import model_validator

from kimik3_lab.deploy.command import HEAD, SELF, Deployment, GroupPlan
from kimik3_lab.deploy.manifests.script import NodeCommand, NodeScript

__all__ = ["RAY_PORT", "RayScript", "ray_script"]

RAY_PORT = 6379


class RayScript(NodeScript):
    """A :class:`NodeScript` in which every rank runs the same line."""

    @model_validator(mode="after")
    def _symmetric(self) -> RayScript:
        words = {command.words for command in self.commands}
        if len(words) > 1:
            raise ValueError("ray symmetric-run takes the same line on every node")
        (line,) = words
        expected = ("ray", "symmetric-run", "--address", f"{HEAD}:{RAY_PORT}", "--min-nodes")
        if line[:5] != expected or line[5] != str(len(self.commands)):
            raise ValueError(
                f"expected {' '.join(expected)} {len(self.commands)}, got {' '.join(line[:6])}"
            )
        if line[6] != "--num-gpus" or line[8:11] != ("--", "vllm", "serve"):
            raise ValueError(f"expected --num-gpus N -- vllm serve, got {' '.join(line[6:11])}")
        backend = dict(itertools.pairwise(line)).get("--distributed-executor-backend")
        if backend != "ray":
            raise ValueError(f"the executor must be ray, got {backend}")
        for option in ("--nnodes", "--node-rank", "--headless"):
            if option in line:
                raise ValueError(f"{option} is for a command on every node, Ray runs one")
        return self


def ray_script(deployment: Deployment, group: GroupPlan) -> RayScript:
    """Script of one group, which becomes a Ray cluster of its own.

    Raises
    ------
    ValueError
        If the deployment was not planned for Ray.
    """
    spec = deployment.spec
    if spec.launcher != "ray":
        raise ValueError(f"plan with launcher='ray' for this, got {spec.launcher!r}")
    size = (str(len(group.nodes)), "--num-gpus", str(group.gpus_per_node))
    start = ("ray", "symmetric-run", "--address", f"{HEAD}:{RAY_PORT}", "--min-nodes", *size, "--")
    return RayScript(
        title=f"Kimi K3 on vLLM {spec.vllm} and Ray: {group.role}, {group.layout}, {spec.hardware}",
        role=group.role,
        commands=tuple(
            NodeCommand(
                rank=node.rank,
                host=node.host,
                environment=node.environment(HEAD, SELF),
                words=(*start, "vllm", "serve", *node.arguments(HEAD, SELF)),
            )
            for node in group.nodes
        ),
    )
