"""Make the files of a manifest, check them by reading them back, and write them.

Needs pydantic and pyyaml. Lesson 13 and ``k3lab deploy --manifest`` use it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kimik3_lab.deploy.command import Deployment
from kimik3_lab.deploy.manifests.compose import compose_files
from kimik3_lab.deploy.manifests.kubernetes import bundle
from kimik3_lab.deploy.manifests.ray import ray_script
from kimik3_lab.deploy.manifests.script import node_script, router_script
from kimik3_lab.deploy.manifests.slurm import slurm_job
from kimik3_lab.deploy.plan import plan

__all__ = ["KINDS", "ManifestError", "manifest", "write_files"]

KINDS = ("shell", "ray", "slurm", "kubernetes", "compose")


class ManifestError(ValueError):
    """Files that cannot be written, or that would not read back as what was meant."""


class _Rendered(Protocol):
    def render(self) -> str: ...

    @classmethod
    def parse(cls, text: str) -> Any: ...


def manifest(deployment: Deployment, kind: str) -> dict[str, str]:
    """File name to text.

    Every file is parsed back into its model, which must come out equal.

    Raises
    ------
    ManifestError
        If the kind is unknown or a file does not read back.
    RefusedError
        If the deployment cannot be started with Ray.

    Examples
    --------
    >>> from kimik3_lab.deploy.spec import DeploymentSpec
    >>> list(manifest(plan(DeploymentSpec()), "slurm"))
    ['k3.sbatch', 'serve.sh']
    """
    if kind not in KINDS:
        raise ManifestError(f"no manifest {kind!r}; expected one of {', '.join(KINDS)}")
    launcher = "ray" if kind == "ray" else "mp"
    if deployment.spec.launcher != launcher:
        deployment = plan(deployment.spec.model_copy(update={"launcher": launcher}))
    models: dict[str, _Rendered] = {}
    if kind == "kubernetes":
        models["k3.yaml"] = bundle(deployment)
    elif kind == "compose":
        models |= compose_files(deployment)
    else:
        if kind == "slurm":
            models["k3.sbatch"] = slurm_job(deployment)
        script = ray_script if kind == "ray" else node_script
        models |= {f"{group.role}.sh": script(deployment, group) for group in deployment.groups}
    router = router_script(deployment)
    if router is not None and kind != "kubernetes":
        models["router.sh"] = router
    return {name: _checked(name, model) for name, model in models.items()}


def _checked(name: str, model: _Rendered) -> str:
    text = model.render()
    try:
        again = type(model).parse(text)
    except ValueError as error:
        raise ManifestError(f"{name} does not read back: {error}") from error
    if again != model:
        raise ManifestError(f"{name} reads back as something else than was written")
    return text


def write_files(files: Mapping[str, str], folder: str | Path, *, force: bool = False) -> list[Path]:
    """Write all files into a folder; each appears whole or not at all.

    Raises
    ------
    ManifestError
        If one exists and ``force`` is false, or the folder cannot be made; nothing is written then.
    """
    folder = Path(folder)
    existing = [name for name in files if (folder / name).exists()]
    if existing and not force:
        raise ManifestError(f"{folder} already has {', '.join(existing)}: --force writes over them")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(folder / name, text) for name, text in files.items()]
    except OSError as error:
        raise ManifestError(f"cannot write to {folder}: {error}") from error


def _write(path: Path, text: str) -> Path:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o755 if path.suffix in (".sh", ".sbatch") else 0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
