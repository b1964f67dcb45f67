"""An OpenAI-compatible HTTP endpoint in front of the engine; lesson 10 builds and measures it.

Importing this package loads nothing: each name below is imported when it is first used, so a
notebook that wants only the :class:`Tokenizer` needs neither FastAPI nor uvicorn.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimik3_lab.serving.server.app import build_app
    from kimik3_lab.serving.server.async_engine import AsyncEngine
    from kimik3_lab.serving.server.background import RunningServer, start_in_background
    from kimik3_lab.serving.server.engine_settings import EngineSettings, find_preset
    from kimik3_lab.serving.server.launch import build_engine, run
    from kimik3_lab.serving.server.metrics import ServerMetrics
    from kimik3_lab.serving.server.options import ServeOptions, ServerStartError
    from kimik3_lab.serving.server.scripted import ScriptedEngine, start_scripted
    from kimik3_lab.serving.server.tokenizer import Detokenizer, Tokenizer, TokenizerError

__all__ = [
    "AsyncEngine",
    "Detokenizer",
    "EngineSettings",
    "RunningServer",
    "ScriptedEngine",
    "ServeOptions",
    "ServerMetrics",
    "ServerStartError",
    "Tokenizer",
    "TokenizerError",
    "build_app",
    "build_engine",
    "find_preset",
    "run",
    "start_in_background",
    "start_scripted",
]

_MODULE_OF = {
    "AsyncEngine": "async_engine",
    "Detokenizer": "tokenizer",
    "EngineSettings": "engine_settings",
    "RunningServer": "background",
    "ScriptedEngine": "scripted",
    "ServeOptions": "options",
    "ServerMetrics": "metrics",
    "ServerStartError": "options",
    "Tokenizer": "tokenizer",
    "TokenizerError": "tokenizer",
    "build_app": "app",
    "build_engine": "launch",
    "find_preset": "engine_settings",
    "run": "launch",
    "start_in_background": "background",
    "start_scripted": "scripted",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
