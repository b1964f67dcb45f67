"""Record what releases of vLLM do when a setting is left out, from their own sources.

    .venv/bin/python tools/record_vllm_defaults.py WHEEL [WHEEL ...]

Lesson 12 compares what this writes: ``data/deploy/vllm_defaults.json``. It complements
``tools/record_vllm_flags.py``: there the parser says which options exist, but three defaults that
matter here are no parser's. Environment variables have theirs in ``vllm/envs.py``; how many tokens
and requests a step may hold is worked out from the GPU's memory, and whether prefixes are cached
from the model, both in ``vllm/engine/arg_utils.py``. Only these two files are read from a wheel.
Of the second, one function and one expression are run, by themselves, with a made-up GPU and model.
No GPU and no installed vLLM is needed.
"""

from __future__ import annotations

import argparse
import ast
import enum
import hashlib
import json
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "data" / "deploy" / "vllm_defaults.json"
#: Bytes that a GPU reports, its name and its compute capability.
GPUS = {
    "B300": (275_040 * 2**20, "nvidia b300 sxm6", (10, 3)),
    "H200": (143_771 * 2**20, "nvidia h200", (9, 0)),
}
#: Readers of ``vllm/envs.py`` that take the variable and then its default.
READERS = ("os.getenv", "os.environ.get")


class RecordError(Exception):
    """A wheel that could not be read; the message says what was looked for."""


class MissingAnswer(BaseException):
    """Asked something that the made-up GPU cannot answer.

    vLLM falls back to small defaults on any Exception; this is none, so that it gets through.
    """


class Platform:
    """A made-up GPU, as vLLM asks for it."""

    def __init__(self, memory_bytes: int, name: str, capability: tuple[int, int]) -> None:
        self.get_device_total_memory = lambda: memory_bytes
        self.get_device_name = lambda: name
        self.is_device_capability = lambda asked: asked == capability
        self.is_cuda = lambda: True
        self.is_tpu = self.is_cpu = self.is_rocm = self.is_xpu = lambda: False

    def __getattr__(self, name: str) -> Any:
        raise MissingAnswer(name)


class UsageContext(enum.Enum):
    """Stands for vLLM's class of the same name."""

    LLM_CLASS = "LLM_CLASS"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"


def environment_defaults(source: str) -> dict[str, str]:
    """Default of each variable that ``envs.py`` reads with one, as Python text.

    Variables that have none, or compute it, are left out.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.AnnAssign | ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Name) and target.id == "environment_variables":
            found = dict(_default_items(node.value))
            return dict(sorted(found.items()))
    raise RecordError("vllm/envs.py has no dictionary environment_variables")


def _default_items(table: ast.Dict) -> Iterator[tuple[str, str]]:
    for key, value in zip(table.keys, table.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            continue
        for call in ast.walk(value):
            if (
                isinstance(call, ast.Call)
                and ast.unparse(call.func) in READERS
                and len(call.args) == 2
                and isinstance(call.args[0], ast.Constant)
                and call.args[0].value == key.value
            ):
                yield key.value, ast.unparse(call.args[1])
                break


def batch_defaults(source: str, platform: Platform) -> dict[str, int]:
    """Run ``get_batch_defaults`` alone and return what an API server on that GPU gets."""
    (function,) = _named(ast.parse(source), ast.FunctionDef, "get_batch_defaults")
    function.decorator_list = []
    usage = types.ModuleType("vllm.usage.usage_lib")
    usage.UsageContext = UsageContext  # type: ignore[attr-defined]
    stand_ins = {"vllm": types.ModuleType("vllm"), "vllm.usage": types.ModuleType("vllm.usage"),
                 "vllm.usage.usage_lib": usage}  # fmt: skip
    names = {"current_platform": platform, "GiB_bytes": 2**30, "UsageContext": UsageContext}
    # Annotations name classes that are not here; as text they are not looked up.
    future = ast.parse("from __future__ import annotations").body
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        exec(compile(ast.Module([*future, function], []), "arg_utils.py", "exec"), names)
        tokens, seqs = names["get_batch_defaults"](None, 8)  # type: ignore[operator]
    except (NameError, MissingAnswer) as error:
        raise RecordError(f"get_batch_defaults asks for something new: {error}") from error
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    server = UsageContext.OPENAI_API_SERVER
    return {"max_num_batched_tokens": tokens[server], "max_num_seqs": seqs[server]}


def hybrid_prefix_caching(source: str) -> bool:
    """Whether prefixes of a hybrid model are cached when the option is left out."""
    found = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "default_prefix_caching"
    ]
    if len(found) != 1:
        raise RecordError(f"default_prefix_caching is assigned {len(found)} times, expected once")
    model = types.SimpleNamespace(is_prefix_caching_supported=True, is_hybrid=True)
    code = compile(ast.Expression(found[0]), "arg_utils.py", "eval")
    return bool(eval(code, {"model_config": model}))


def _named(tree: ast.AST, kind: type[ast.FunctionDef], name: str) -> list[ast.FunctionDef]:
    found = [node for node in ast.walk(tree) if isinstance(node, kind) and node.name == name]
    if len(found) != 1:
        raise RecordError(f"{name} is defined {len(found)} times, expected once")
    return found


def record(wheel: Path) -> tuple[str, dict[str, Any]]:
    """Return a wheel's version and its defaults."""
    with zipfile.ZipFile(wheel) as archive:
        envs = archive.read("vllm/envs.py").decode()
        arguments = archive.read("vllm/engine/arg_utils.py").decode()
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return wheel.name.split("-")[1], {
        "wheel": wheel.name,
        "sha256": digest,
        "api_server": {name: batch_defaults(arguments, Platform(*g)) for name, g in GPUS.items()},
        "hybrid_prefix_caching": hybrid_prefix_caching(arguments),
        "environment": environment_defaults(envs),
    }


def main() -> int:
    """Record wheels and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE")
    given = parser.parse_args()
    try:
        found = dict(record(wheel) for wheel in given.wheels)
    except (RecordError, KeyError, OSError, zipfile.BadZipFile) as error:
        print(f"record_vllm_defaults: {error}", file=sys.stderr)
        return 1
    order = sorted(found, key=lambda version: [int(part) for part in version.split(".")])
    body = {
        "schema_version": 1,
        "what": "what each release does when a setting is left out; see "
        "tools/record_vllm_defaults.py",
        "releases": {version: found[version] for version in order},
    }
    unfinished = given.output.with_name(f".{given.output.name}.tmp")
    unfinished.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(given.output)
    print(f"wrote {given.output}: {', '.join(order)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
