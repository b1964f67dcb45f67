"""Manifests: what bash, Slurm, Ray, Kubernetes and Compose would run is the planned command."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from kimik3_lab.deploy.command import HEAD, SELF, Deployment
from kimik3_lab.deploy.manifests.compose import ComposeFile
from kimik3_lab.deploy.manifests.kubernetes import Bundle, bundle
from kimik3_lab.deploy.manifests.ray import RayScript, ray_script
from kimik3_lab.deploy.manifests.script import (
    NodeCommand,
    NodeScript,
    RouterScript,
    node_script,
    router_script,
)
from kimik3_lab.deploy.manifests.slurm import SlurmJob, SlurmStep, slurm_job
from kimik3_lab.deploy.manifests.write import KINDS, ManifestError, manifest, write_files
from kimik3_lab.deploy.plan import plan
from kimik3_lab.deploy.spec import DeploymentSpec

CASES = {
    "one node": {"spec": "dspark"},
    "two nodes": {"hardware": "b200", "nodes": 2, "workload": "chat"},
    "data parallel": {"hardware": "gb300", "nodes": 4, "strategy": "dep"},
    "apart": {"nodes": 3, "strategy": "pd", "spec": "dspark", "vllm": "0.27.1"},
}
#: Takes the place of a program on the path and says how it was called.
RECORDER = r"""#!/bin/sh
called=$(printf '%s\037' "${0##*/}" "$@")
set=$(env | grep -E '^(VLLM|NCCL|UCX|PYTORCH)')
printf '%s\036%s\035' "$called" "$set" >> "$RECORD"
"""


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def deployment(request: pytest.FixtureRequest) -> Deployment:
    return plan(DeploymentSpec(**request.param))


@pytest.fixture(scope="module")
def two_nodes() -> Deployment:
    return plan(DeploymentSpec(**CASES["two nodes"]))


@pytest.fixture(scope="module")
def apart() -> Deployment:
    return plan(DeploymentSpec(**CASES["apart"]))


class Shell:
    """Runs scripts with stand-ins for vllm, ray, srun and the like, which record their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.record = folder, folder / "record"
        (folder / "bin").mkdir()

    def program(self, name: str, text: str = RECORDER) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *command: str, **environment: str) -> list[tuple[str, list[str], dict[str, str]]]:
        self.record.unlink(missing_ok=True)
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        env = {"PATH": path, "RECORD": str(self.record), "HOME": str(self.folder), **environment}
        done = subprocess.run(
            command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        calls = self.record.read_text() if self.record.exists() else ""
        return [self._call(call) for call in calls.split("\035")[:-1]]

    @staticmethod
    def _call(text: str) -> tuple[str, list[str], dict[str, str]]:
        called, _, variables = text.partition("\036")
        name, *words = called.split("\037")[:-1]
        return name, words, dict(line.split("=", 1) for line in variables.splitlines())


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    shell = Shell(tmp_path)
    for name in ("vllm", "ray", "vllm-router"):
        shell.program(name)
    return shell


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_reads_back_and_parses(deployment: Deployment, kind: str) -> None:
    files = manifest(deployment, kind)
    assert files
    for name, text in files.items():
        if name.endswith((".sh", ".sbatch")):
            assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
            assert text.startswith("#!/usr/bin/env bash\n") and text.endswith("\n")
        else:
            assert list(yaml.safe_load_all(text))


def test_bash_runs_the_planned_command(deployment: Deployment, shell: Shell) -> None:
    write_files(manifest(deployment, "shell"), shell.folder)
    for group in deployment.groups:
        for node in group.nodes:
            ((program, words, environment),) = shell.run("bash", f"{group.role}.sh", str(node.rank))
            assert [program, *words] == node.argv
            assert environment == node.environment()


def test_bash_takes_other_addresses(two_nodes: Deployment, shell: Shell) -> None:
    write_files(manifest(two_nodes, "shell"), shell.folder)
    ((_, words, environment),) = shell.run(
        "bash", "serve.sh", K3_RANK="1", K3_HEAD="10.1.1.1", K3_SELF="10.1.1.2"
    )
    assert words[1:] == two_nodes.nodes[1].arguments("10.1.1.1", "10.1.1.2")
    assert environment["VLLM_HOST_IP"] == "10.1.1.2"


def test_a_rank_that_does_not_exist_is_an_error(two_nodes: Deployment, tmp_path: Path) -> None:
    write_files(manifest(two_nodes, "shell"), tmp_path)
    for arguments, status in (([], 1), (["2"], 64), (["x"], 64)):
        done = subprocess.run(
            ["bash", "serve.sh", *arguments], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == status and "0 to 1" in done.stderr


def test_slurm_starts_every_command_on_its_node(deployment: Deployment, shell: Shell) -> None:
    """With stand-ins for srun and scontrol: each task of a step runs as Slurm would run it."""
    shell.program("scontrol", "#!/bin/sh\nseq -f 'node%.0f' 0 9 | head -n " + str(
        deployment.spec.nodes
    ) + "\n")  # fmt: skip
    shell.program("getent", '#!/bin/sh\necho "10.9.9.${2#node} STREAM $2"\n')
    shell.program("hostname", '#!/bin/sh\necho "node$K3_AT"\n')
    shell.program(
        "srun",
        '#!/usr/bin/env bash\nset -e\nfor word in "$@"; do case $word in\n'
        "--ntasks=*) tasks=${word#*=};; --relative=*) at=${word#*=};; --*) ;; *) break;; esac\n"
        "shift; done\nfor ((i = 0; i < tasks; i++)); do\n"
        'SLURM_PROCID=$i K3_AT=$((at + i)) "$@"\ndone\n',
    )
    write_files(manifest(deployment, "slurm"), shell.folder)
    # The file ends when the first step does; here all of them should.
    path = shell.folder / "k3.sbatch"
    text = path.read_text()
    assert "\nwait -n\n" in text
    path.write_text(text.replace("\nwait -n\n", "\nwait\n"))
    calls = shell.run("bash", "k3.sbatch", SLURM_SUBMIT_DIR=str(shell.folder),
                      SLURM_JOB_NODELIST="node[0-9]")  # fmt: skip
    expected = []
    for number, node in enumerate(deployment.nodes):
        head = next(i for i, n in enumerate(deployment.nodes) if n.role == node.role)
        own, first = f"10.9.9.{number}", f"10.9.9.{head}"
        expected.append(
            ["vllm", ["serve", *node.arguments(first, own)], node.environment(first, own)]
        )
    found = [list(call) for call in calls if call[0] == "vllm"]
    assert sorted(found, key=json.dumps) == sorted(expected, key=json.dumps)
    routers = [call for call in calls if call[0] == "vllm-router"]
    assert len(routers) == (deployment.router is not None)
    if routers:
        assert "http://node0:30000" in routers[0][1]


def test_ray_starts_one_command_on_the_same_line_everywhere(
    deployment: Deployment, shell: Shell
) -> None:
    write_files(manifest(deployment, "ray"), shell.folder)
    again = plan(deployment.spec.model_copy(update={"launcher": "ray"}))
    for group in again.groups:
        lines = []
        for node in group.nodes:
            ((program, words, _),) = shell.run("bash", f"{group.role}.sh", str(node.rank))
            assert program == "ray" and words[0] == "symmetric-run"
            assert words[words.index("--") + 1 :] == node.argv
            lines.append(words)
        assert all(line == lines[0] for line in lines)
        assert lines[0][1:7] == [
            "--address", f"{group.nodes[0].host}:6379", "--min-nodes", str(len(group.nodes)),
            "--num-gpus", str(group.gpus_per_node),
        ]  # fmt: skip


def test_the_router_finds_all_fronts(apart: Deployment, shell: Shell) -> None:
    write_files(manifest(apart, "shell"), shell.folder)
    ((_, words, _),) = shell.run("bash", "router.sh")
    assert words == list(apart.router[1:])
    ((_, words, _),) = shell.run("bash", "router.sh", K3_HOSTS="a b c")
    assert [word for word in words if word.startswith("http")] == [
        "http://a:30000", "http://b:30000", "http://c:30000",
    ]  # fmt: skip


def test_pods_run_the_script(deployment: Deployment, shell: Shell) -> None:
    objects = list(yaml.safe_load_all(manifest(deployment, "kubernetes")["k3.yaml"]))
    scripts = {
        body["metadata"]["name"]: body["data"]["serve.sh"]
        for body in objects
        if body["kind"] == "ConfigMap"
    }
    for group in deployment.groups:
        (shell.folder / "serve.sh").write_text(scripts[f"k3-{group.role}-script"])
        for node in group.nodes:
            ((_, words, environment),) = shell.run(
                "bash", "serve.sh", LWS_WORKER_INDEX=str(node.rank),
                LWS_LEADER_ADDRESS="10.2.2.1", K3_SELF="10.2.2.9",
            )  # fmt: skip
            assert words[1:] == node.arguments("10.2.2.1", "10.2.2.9")
            assert environment == node.environment("10.2.2.1", "10.2.2.9")


def test_kubernetes_objects(apart: Deployment) -> None:
    text = manifest(apart, "kubernetes")["k3.yaml"]
    objects = list(yaml.safe_load_all(text))
    kinds = [body["kind"] for body in objects]
    assert kinds.count("LeaderWorkerSet") == 2 and kinds.count("Service") == 3
    sets = {body["metadata"]["name"]: body for body in objects if body["kind"] == kinds[2]}
    group = sets["k3-decode"]["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    container = group["leaderTemplate"]["spec"]["containers"][0]
    assert container["image"] == "vllm/vllm-openai:v0.27.1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["startupProbe"]["failureThreshold"] * 10 >= 3600
    assert any(v.get("emptyDir", {}).get("medium") == "Memory"
               for v in group["leaderTemplate"]["spec"]["volumes"])  # fmt: skip
    router = next(body for body in objects if body["kind"] == "Deployment")
    command = router["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:2] == ["bash", "-c"] and command[4] == "vllm-router"
    assert command.count("--decode") == 1 and "http://k3-decode:30000" in command


def test_workers_that_do_not_answer_have_no_probe(two_nodes: Deployment) -> None:
    objects = yaml.safe_load_all(manifest(two_nodes, "kubernetes")["k3.yaml"])
    group = next(b for b in objects if b["kind"] == "LeaderWorkerSet")["spec"]
    leader, worker = (
        group["leaderWorkerTemplate"][name]["spec"]["containers"][0]
        for name in ("leaderTemplate", "workerTemplate")
    )
    for name in ("readinessProbe", "livenessProbe", "startupProbe", "ports"):
        assert name in leader and name not in worker


def test_answers_may_end_before_a_server_is_killed(two_nodes: Deployment) -> None:
    objects = yaml.safe_load_all(manifest(two_nodes, "kubernetes")["k3.yaml"])
    group = next(b for b in objects if b["kind"] == "LeaderWorkerSet")["spec"]
    for name, node in zip(("leaderTemplate", "workerTemplate"), two_nodes.nodes, strict=True):
        words = node.arguments()
        drain = int(words[words.index("--shutdown-timeout") + 1])
        grace = group["leaderWorkerTemplate"][name]["spec"]["terminationGracePeriodSeconds"]
        assert 0 < drain < grace == node.stop_s
    for name, text in manifest(two_nodes, "compose").items():
        if name.endswith("yaml"):
            assert yaml.safe_load(text)["services"]["vllm"]["stop_grace_period"] == f"{grace}s"


def test_a_release_that_keeps_its_defaults_keeps_this_one() -> None:
    kept = plan(DeploymentSpec(defaults="release"))
    assert kept.nodes[0].stop_s is None
    assert "terminationGracePeriodSeconds" not in manifest(kept, "kubernetes")["k3.yaml"]


def test_compose_runs_the_planned_command(deployment: Deployment) -> None:
    files = {n: t for n, t in manifest(deployment, "compose").items() if n.endswith("yaml")}
    for node, text in zip(deployment.nodes, files.values(), strict=True):
        service = yaml.safe_load(text)["services"]["vllm"]
        assert [*service["entrypoint"], *service["command"]] == node.argv
        assert service["environment"] == node.environment()
        assert ("healthcheck" in service) == node.answers


def test_words_survive_quoting() -> None:
    nasty = ("it's", 'say "hi"', "a b", "{}", "*", "~", "#x", "a;b&c|d", "(x)", "!", "é", "", "-1")
    command = NodeCommand(
        rank=0, host="h", environment={"A": "x y", "B": SELF},
        words=("vllm", "serve", "m", *nasty, HEAD, f"{HEAD}:1"),
    )  # fmt: skip
    script = NodeScript(title="t", role="serve", commands=(command,))
    assert NodeScript.parse(script.render()) == script


def text_mutant(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  1)\n", "  2)\n", "count from 0"),
        ("exec vllm", "exec echo", "no command of vLLM"),
        ("    exec vllm", "    sudo vllm", "no line of k3lab deploy"),
        ("    export VLLM_HOST_IP", "    export VLLM-HOST-IP", "no name of a variable"),
        ("# Run on every node", "# Run somewhere", "heading"),
        ("--port 30000", "--port '$(reboot)'", "bash would act on"),
    ],
)
def test_a_wrong_script_is_refused(two_nodes: Deployment, old: str, new: str, said: str) -> None:
    text = node_script(two_nodes, two_nodes.groups[0]).render()
    with pytest.raises(ValueError, match=re.escape(said)):
        NodeScript.parse(text_mutant(text, old, new))


def test_a_changed_word_is_not_the_same_script(two_nodes: Deployment) -> None:
    script = node_script(two_nodes, two_nodes.groups[0])
    for old, new in (("30000", "30001"), ("--headless", "--no-such"), ('"${K3_HEAD}"', "head")):
        assert NodeScript.parse(text_mutant(script.render(), old, new)) != script


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("#SBATCH --nodes=3\n", "", "directives are missing: nodes"),
        ("#SBATCH --nodes=3\n", "#SBATCH --nodes=4\n", "the steps use 3 of 4 nodes"),
        ("--nodes=1 --ntasks=1", "--nodes=1 --ntasks=2", "2 tasks"),
        ('K3_HEAD="${names[1]}"', 'K3_HEAD="${names[0]}"', "head 0 of nodes from 1"),
        ("--time=24:00:00", "--time=tomorrow", "time"),
        ("/prefill.sh", "/decode.SH", "decode.sh starts at node 1, expected 0"),
    ],
)
def test_a_wrong_batch_file_is_refused(apart: Deployment, old: str, new: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        SlurmJob.parse(text_mutant(slurm_job(apart).render(), old, new))


def test_steps_must_not_overlap() -> None:
    steps = (SlurmStep(script="a.sh", first=0, nodes=2), SlurmStep(script="b.sh", first=1, nodes=1))
    with pytest.raises(ValidationError, match=r"b\.sh starts at node 1, expected 2"):
        SlurmJob(job_name="k3", nodes=3, gpus_per_node=8, steps=steps)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("--min-nodes 2", "--min-nodes 3", "--min-nodes 2"),
        ("--distributed-executor-backend ray", "--distributed-executor-backend mp", "must be ray"),
        ("--port 30000", "--port 30000 --headless", "--headless is for a command on every node"),
        ('"${K3_HEAD}:6379"', "127.0.0.1:6379", "--address"),
        ("--num-gpus 8", "--num-cpus 8", "--num-gpus"),
    ],
)
def test_a_wrong_ray_script_is_refused(old: str, new: str, said: str) -> None:
    spec = DeploymentSpec(**CASES["two nodes"], launcher="ray")
    found = plan(spec)
    text = ray_script(found, found.groups[0]).render()
    assert old in text
    with pytest.raises(ValueError, match=re.escape(said)):
        RayScript.parse(text.replace(old, new))


def test_ranks_with_different_ray_lines_are_refused() -> None:
    found = plan(DeploymentSpec(**CASES["two nodes"], launcher="ray"))
    text = ray_script(found, found.groups[0]).render()
    with pytest.raises(ValueError, match="same line on every node"):
        RayScript.parse(text_mutant(text, "--port 30000", "--port 30001"))


def test_ray_needs_a_plan_for_ray(two_nodes: Deployment) -> None:
    with pytest.raises(ValueError, match="launcher='ray'"):
        ray_script(two_nodes, two_nodes.groups[0])


def bodies(deployment: Deployment) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(bundle(deployment).render()))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ((2, "spec", "leaderWorkerTemplate", "size"), 3, "3 pods, its script 2 commands"),
        ((2, "spec", "leaderWorkerTemplate", "sise"), 2, "Extra inputs"),
        ((3, "spec", "selector", "app"), "k3-server", "selects no pod"),
        ((3, "spec", "ports", 0, "targetPort"), 80, "port 80, not open"),
        ((0, "metadata", "name"), "weights", "needs the PersistentVolumeClaim k3-weights"),
        ((1, "metadata", "name"), "other", "the ConfigMap k3-serve-script is missing"),
        ((2, "metadata", "name"), "K3_serve", "pattern"),
        ((2, "kind"), "StatefulSet", "StatefulSet"),
        ((0, "spec", "resources", "requests", "storage"), "1.7 TB", "pattern"),
        ((0, "spec", "accessModes"), ["ReadWriteOnce"], "ReadWriteMany"),
    ],
)
def test_a_wrong_object_is_refused(
    two_nodes: Deployment, path: tuple[Any, ...], value: Any, said: str
) -> None:
    objects = bodies(two_nodes)
    at: Any = objects
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(ValidationError, match=re.escape(said)):
        Bundle.parse(yaml.safe_dump_all(objects))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["resources"]["requests"].update({"nvidia.com/gpu": "4"}), "must agree"),
        (lambda c: c["startupProbe"]["httpGet"].update(port=1), "asks port 1"),
        (lambda c: c["volumeMounts"].append({"name": "x", "mountPath": "/x"}), "no volume is"),
        (lambda c: c["env"].append({"name": "A"}), "needs a value or a source"),
        (lambda c: c.update(image="vllm/vllm-openai"), "pattern"),
        (lambda c: c.pop("command"), "Field required"),
    ],
)
def test_a_wrong_container_is_refused(two_nodes: Deployment, change: Any, said: str) -> None:
    objects = bodies(two_nodes)
    group = objects[2]["spec"]["leaderWorkerTemplate"]
    change(group["leaderTemplate"]["spec"]["containers"][0])
    with pytest.raises(ValidationError, match=said):
        Bundle.parse(yaml.safe_dump_all(objects))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update(command=[*s["command"], "$HOME"]), "Compose would fill in"),
        (lambda s: s.pop("healthcheck"), "if and only if it answers"),
        (lambda s: s.update(entrypoint=["python"]), "entry point"),
        (lambda s: s.update(volumes=["models:/models"]), "is not declared"),
        (lambda s: s.update(network="host"), "Extra inputs"),
        (lambda s: s.update(ipc="private"), "host"),
    ],
)
def test_a_wrong_compose_file_is_refused(change: Any, said: str) -> None:
    found = plan(DeploymentSpec())
    body = yaml.safe_load(manifest(found, "compose")["compose.serve-0.yaml"])
    change(body["services"]["vllm"])
    with pytest.raises(ValidationError, match=said):
        ComposeFile.parse(yaml.safe_dump(body))


def test_a_wrong_router_is_refused(apart: Deployment) -> None:
    script = router_script(apart)
    with pytest.raises(ValidationError, match="host 7 of 3"):
        RouterScript(hosts=script.hosts, words=(*script.words, "http://@host7@:1"))
    with pytest.raises(ValueError, match="no router script"):
        RouterScript.parse("exec vllm-router")


def test_files_appear_whole_and_never_over_others(two_nodes: Deployment, tmp_path: Path) -> None:
    files = manifest(two_nodes, "slurm")
    folder = tmp_path / "new" / "folder"
    paths = write_files(files, folder)
    assert [path.name for path in paths] == ["k3.sbatch", "serve.sh"]
    assert all(os.access(path, os.X_OK) for path in paths)
    paths[0].write_text("mine")
    paths[1].unlink()
    with pytest.raises(ManifestError, match=r"already has k3\.sbatch"):
        write_files(files, folder)
    assert paths[0].read_text() == "mine" and not paths[1].exists()
    write_files(files, folder, force=True)
    assert paths[0].read_text() == files["k3.sbatch"]
    assert sorted(path.name for path in folder.iterdir()) == ["k3.sbatch", "serve.sh"]
    with pytest.raises(ManifestError, match="cannot write"):
        write_files(files, paths[0] / "below")


def test_an_unknown_kind_is_named(two_nodes: Deployment) -> None:
    with pytest.raises(ManifestError, match="expected one of shell, ray"):
        manifest(two_nodes, "helm")


def test_a_printed_command_is_the_planned_one(deployment: Deployment) -> None:
    for node in deployment.nodes:
        assert shlex.split(shlex.join(node.argv)) == node.argv
