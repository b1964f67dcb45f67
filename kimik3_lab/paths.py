"""Where the lab finds its data files and keeps the reader's own.

Needs the standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["DATA_ENV", "data_dir", "default_model_dir", "repository_dir"]

#: Set this to use data files from another folder than the checkout's ``data/``.
DATA_ENV = "K3LAB_DATA"


def repository_dir() -> Path:
    """Folder that holds ``kimik3_lab/``, ``notebooks/`` and ``data/``."""
    return Path(__file__).resolve().parents[1]


def data_dir() -> Path:
    """Folder of the data files that ship with the lab.

    Raises
    ------
    FileNotFoundError
        If there is none; the message says how to name one.
    """
    folder = Path(os.environ.get(DATA_ENV) or repository_dir() / "data")
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no data folder at {folder}: run from a checkout installed with 'make install', "
            f"or set {DATA_ENV} to the folder that holds tiny-k3/"
        )
    return folder


def default_model_dir() -> Path:
    """Folder of the tiny K3 that lessons and ``k3lab serve`` use by default."""
    return data_dir() / "tiny-k3"
