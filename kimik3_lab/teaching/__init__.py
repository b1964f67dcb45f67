"""What the notebooks need around the lab: sessions, predictions, figures, a check of the machine.

Only notebooks and the ``k3lab`` commands import this package; the lab itself never does. Importing
it loads nothing heavy: take the module that you need, as every lesson's Setup cell does with
``from kimik3_lab.teaching import session as lab``.
"""

from __future__ import annotations

__all__: list[str] = []
