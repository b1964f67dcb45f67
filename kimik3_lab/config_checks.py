"""What makes a Kimi K3 configuration wrong, and the error that says so.

Needs the standard library only. :mod:`kimik3_lab.config` calls it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["ConfigError", "check_config", "read_config", "typed_fields"]

_Config = TypeVar("_Config")


class ConfigError(ValueError):
    """A configuration that cannot describe a Kimi K3; the message says what to change."""


def read_config(path: str | Path, parse: Callable[[Any], _Config]) -> _Config:
    """Read ``config.json`` in the folder ``path`` and hand its content to ``parse``.

    Raises
    ------
    ConfigError
        If the folder or the file is missing or not JSON, or whatever ``parse`` objects to; with
        the path in the message.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"no model folder at {folder}: give a folder that holds config.json, "
            "for example data/tiny-k3"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{folder} has no config.json, so it is not a model folder")
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    try:
        return parse(body)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


#: Fields that a config.json may leave out: not in the release, or with an obvious default.
_OPTIONAL = {"mla_norm_eps", "expert_dtype", "initializer_range", "dtype", "gate_lower_bound"}


def typed_fields(
    cls: type,
    body: dict[str, Any],
    *,
    where: str = "",
    skip: Collection[str] = (),
) -> dict[str, Any]:
    """Pick the fields of the dataclass ``cls`` out of ``body``, checking presence and type of each.

    Parameters
    ----------
    cls
        Its fields have defaults, whose types are the expected ones.
    body
        Content of a ``config.json``, or an object inside it.
    where
        Prefix of field names in messages.
    skip
        Fields to leave to the caller.

    Raises
    ------
    ConfigError
        Naming the field.
    """
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.name in skip:
            continue
        if f.name not in body:
            if f.name not in _OPTIONAL:
                raise ConfigError(f"{where}{f.name} is missing (released value: {f.default!r})")
            # An absent bound means the older softplus gate; elsewhere the default is meant.
            if f.name == "gate_lower_bound":
                values[f.name] = None
            continue
        value, want = body[f.name], type(f.default)
        if isinstance(f.default, tuple):
            if not isinstance(value, list | tuple) or not all(type(v) is int for v in value):
                raise ConfigError(f"{where}{f.name} must be a list of integers, got {value!r}")
            value = tuple(value)
        elif f.name == "gate_lower_bound" and value is None:
            pass
        elif want is float and type(value) is int:
            value = float(value)
        elif type(value) is not want:
            raise ConfigError(f"{where}{f.name} must be of type {want.__name__}, got {value!r}")
        values[f.name] = value
    return values


#: Sizes beyond these are damage: the release has 92 x 896 = 82,432 experts.
_MOST, _MOST_EXPERTS = 2**30, 2**20
_POSITIVE = {
    "rms_norm_eps", "mla_norm_eps", "routed_scaling_factor",
    "activation_situ_beta", "activation_situ_linear_beta",
}  # fmt: skip
_MAY_BE_ZERO = {"bos_token_id", "eos_token_id", "pad_token_id", "first_k_dense_replace",
                "num_nextn_predict_layers"}  # fmt: skip


def check_config(config: Any) -> None:
    """Refuse a :class:`~kimik3_lab.config.K3Config` whose parts do not fit.

    Raises
    ------
    ConfigError
        Naming the field to change.
    """
    linear = config.linear_attn_config
    for prefix, obj in (("", config), ("linear_attn_config.", linear)):
        for f in dataclasses.fields(obj):
            value = getattr(obj, f.name)
            if type(value) is int and value < (f.name not in _MAY_BE_ZERO):
                least = 0 if f.name in _MAY_BE_ZERO else 1
                raise ConfigError(f"{prefix}{f.name} must be at least {least}, got {value}")
            if type(value) is int and value > _MOST:
                raise ConfigError(
                    f"{prefix}{f.name}={value:,} is beyond any model; expected at most {_MOST:,}"
                )
            if type(value) is float and not math.isfinite(value):
                raise ConfigError(f"{prefix}{f.name} must be a finite number, got {value}")
            if f.name in _POSITIVE and value <= 0:
                raise ConfigError(f"{prefix}{f.name} must be above 0, got {value}")
    if config.num_hidden_layers * config.num_experts > _MOST_EXPERTS:
        raise ConfigError(
            f"num_hidden_layers={config.num_hidden_layers:,} with num_experts="
            f"{config.num_experts:,} is beyond any model: expected at most {_MOST_EXPERTS:,} "
            "experts in all"
        )
    layers = sorted((*linear.kda_layers, *linear.full_attn_layers))
    if layers != list(range(1, config.num_hidden_layers + 1)):
        raise ConfigError(
            "kda_layers and full_attn_layers together must name each layer from 1 to "
            f"num_hidden_layers={config.num_hidden_layers} once (they are 1-based); got {layers}"
        )
    if config.num_experts_per_token > config.num_experts:
        raise ConfigError(
            f"num_experts_per_token={config.num_experts_per_token} is more than "
            f"num_experts={config.num_experts}"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, name) >= config.vocab_size:
            raise ConfigError(
                f"{name}={getattr(config, name)} lies outside vocab_size={config.vocab_size}"
            )
    bound = linear.gate_lower_bound
    if bound is not None and not -5.0 <= bound < 0.0:
        raise ConfigError(f"gate_lower_bound must lie in [-5, 0) or be null, got {bound}")
    for name, allowed in (
        ("expert_dtype", ("mxfp4", "bf16")),
        ("hidden_act", ("situ",)),
        ("moe_router_activation_func", ("sigmoid",)),
        ("num_expert_group", (1,)),
        ("topk_group", (1,)),
        ("mla_use_nope", (True,)),
        ("mla_use_output_gate", (True,)),
        ("latent_moe_use_norm", (True,)),
        ("tie_word_embeddings", (False,)),
    ):
        if getattr(config, name) not in allowed:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is not part of Kimi K3; "
                f"expected {' or '.join(map(repr, allowed))}"
            )
    if not linear.use_full_rank_gate:
        raise ConfigError("linear_attn_config.use_full_rank_gate=False is Kimi Linear, not K3")
