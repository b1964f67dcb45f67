"""JupyterLab as ``k3lab lab`` runs it: it prints its address when it answers, and stops quietly.

Needs jupyterlab. Run with ``python -m``, it takes the options of ``jupyter lab``;
:mod:`kimik3_lab.commands.lab` writes them.
"""

from __future__ import annotations

import os
import sys

from kimik3_lab.commands.lab import READY_MESSAGE

__all__ = ["main"]


def main() -> None:
    """Run the server until it is stopped.

    Raises
    ------
    SystemExit
        With status 130 on a Ctrl-C before the server is up.
    """
    message = os.environ.pop(READY_MESSAGE, "")  # kernels inherit what is left
    try:
        from jupyter_server.serverapp import ServerApp
        from jupyterlab.labapp import LabApp

        class Server(ServerApp):
            """Its sockets listen before its loop runs: once that runs, it answers."""

            def start_ioloop(self) -> None:
                self.io_loop.add_callback(print, message, flush=True)
                super().start_ioloop()

        # Not a class of our own: the server looks an application up by its module's name.
        LabApp.serverapp_class = Server
        LabApp.launch_instance()
    except KeyboardInterrupt:
        print("\nStopped before JupyterLab was up.")
        sys.exit(130)


if __name__ == "__main__":
    main()
