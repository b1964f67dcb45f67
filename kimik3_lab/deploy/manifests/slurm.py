"""A Slurm batch file: one step for each group of nodes, each running that group's script.

Needs pydantic. Facts: https://slurm.schedmd.com/sbatch.html and srun.html (``--relative`` places a
step on later nodes of the job, ``SLURM_PROCID`` counts the tasks of a step).
"""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kimik3_lab.deploy.command import Deployment

__all__ = ["SlurmJob", "SlurmStep", "slurm_job"]

_FROZEN = ConfigDict(frozen=True, extra="forbid")
_STEP = re.compile(
    r'^K3_HEAD="\$\{names\[(\d+)\]\}" srun --nodes=(\d+) --ntasks=(\d+) --ntasks-per-node=1 '
    r"--relative=(\d+) --kill-on-bad-exit=1 \\\n  bash -c '.*?' \"\$\{here\}/([a-z]+\.sh)\" &$",
    flags=re.MULTILINE,
)


class SlurmStep(BaseModel):
    """Nodes ``first`` to ``first + nodes - 1`` of the job run ``script``."""

    model_config = _FROZEN

    script: str = Field(pattern=r"^[a-z]+\.sh$")
    first: int = Field(ge=0)
    nodes: int = Field(ge=1)


class SlurmJob(BaseModel):
    """The batch file. Steps must cover all nodes, in order."""

    model_config = _FROZEN

    job_name: str = Field(pattern=r"^[a-z0-9-]+$")
    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1)
    time: str = Field(default="24:00:00", pattern=r"^(\d+-)?\d\d:\d\d:\d\d$")
    steps: tuple[SlurmStep, ...] = Field(min_length=1)
    router: bool = False

    @model_validator(mode="after")
    def _covered(self) -> SlurmJob:
        at = 0
        for step in self.steps:
            if step.first != at:
                raise ValueError(f"{step.script} starts at node {step.first}, expected {at}")
            at += step.nodes
        if at != self.nodes:
            raise ValueError(f"the steps use {at} of {self.nodes} nodes")
        return self

    def render(self) -> str:
        """Text of the file."""
        directives = (
            f"--job-name={self.job_name}",
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1",
            f"--gpus-per-node={self.gpus_per_node}",
            "--exclusive",
            "--mem=0",
            f"--time={self.time}",
            "--output=%x-%j.log",
        )
        scripts = ", ".join([*(s.script for s in self.steps), *["router.sh"] * self.router])
        lines = [
            "#!/usr/bin/env bash",
            *(f"#SBATCH {directive}" for directive in directives),
            f"# Keep {scripts} beside this file, and submit from there.",
            "set -euo pipefail",
            'here="${SLURM_SUBMIT_DIR:?submit this with sbatch}"',
            'mapfile -t names < <(scontrol show hostnames "${SLURM_JOB_NODELIST}")',
            "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT",
        ]
        for step in self.steps:
            lines += [
                f'K3_HEAD="${{names[{step.first}]}}" srun --nodes={step.nodes} '
                f"--ntasks={step.nodes} --ntasks-per-node=1 --relative={step.first} "
                "--kill-on-bad-exit=1 \\",
                '  bash -c \'K3_RANK="${SLURM_PROCID}" K3_SELF="$(hostname)" exec bash "$0"\' '
                f'"${{here}}/{step.script}" &',
            ]
        if self.router:
            lines.append('K3_HOSTS="${names[*]}" bash "${here}/router.sh" &')
        lines += ["# One that ends takes the others along.", "wait -n"]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> SlurmJob:
        """Read a rendered file back.

        Raises
        ------
        ValueError
            If a directive is missing or a step is not of the form that :meth:`render` writes.
        """
        found = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, flags=re.MULTILINE))
        missing = {"job-name", "nodes", "gpus-per-node", "time"} - found.keys()
        if missing:
            raise ValueError(f"directives are missing: {', '.join(sorted(missing))}")
        steps = []
        for head, nodes, tasks, first, script in _STEP.findall(text):
            if head != first or nodes != tasks:
                raise ValueError(f"{script}: head {head} of nodes from {first}, {tasks} tasks")
            steps.append(SlurmStep(script=script, first=int(first), nodes=int(nodes)))
        return cls(
            job_name=found["job-name"],
            nodes=int(found["nodes"]),
            gpus_per_node=int(found["gpus-per-node"]),
            time=found["time"],
            steps=tuple(steps),
            router='bash "${here}/router.sh"' in text,
        )


def slurm_job(deployment: Deployment) -> SlurmJob:
    """Batch file of a deployment; its scripts are those of :mod:`.script`.

    Examples
    --------
    >>> from kimik3_lab.deploy.plan import plan
    >>> from kimik3_lab.deploy.spec import DeploymentSpec
    >>> job = slurm_job(plan(DeploymentSpec(nodes=2, strategy="pd")))
    >>> [(step.script, step.first, step.nodes) for step in job.steps], job.router
    ([('prefill.sh', 0, 1), ('decode.sh', 1, 1)], True)
    """
    steps, first = [], 0
    for group in deployment.groups:
        steps.append(SlurmStep(script=f"{group.role}.sh", first=first, nodes=len(group.nodes)))
        first += len(group.nodes)
    return SlurmJob(
        job_name=f"k3-{deployment.spec.strategy}",
        nodes=deployment.spec.nodes,
        gpus_per_node=deployment.groups[0].gpus_per_node,
        steps=tuple(steps),
        router=deployment.router is not None,
    )
