"""The shape of the trained tiny K3.

Needs the standard library only.
"""

from __future__ import annotations

from kimik3_lab.config import K3Config

__all__ = ["target_config"]


def target_config() -> K3Config:
    """Return the shape that is trained.

    Examples
    --------
    >>> target_config().mla_layer_ids
    (3, 7, 11, 12)
    """
    return K3Config.tiny()
