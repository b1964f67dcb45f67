"""Entry point: ``python -m tools.train_tiny_k3 <command>``, from the root of the repository."""

from __future__ import annotations

import argparse
import importlib
import sys
import tarfile

#: Command to module and to what it does.
COMMANDS = {
    "corpus": ("corpus_command", "write the manifest of the text and copy the held-out files"),
    "tokenizer": ("tokenizer_command", "train the tokenizer on the training files"),
    "probe": ("probe_command", "find out how fast this machine trains, and with which settings"),
    "train": ("train_command", "train the target model"),
    "package": ("package_command", "make a model folder of a finished training, and check it"),
    "drafter": ("drafter_command", "train the DSpark drafter of a packaged target"),
    "install": ("install_command", "put target and drafter into data/tiny-k3"),
    "evaluate": ("evaluate_command", "bits per byte against gzip and n-grams; acceptance"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_tiny_k3",
        description="Train the tiny K3 and its drafter on Python's standard library.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    asked = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    module = None
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == asked:  # the others stay unread: torch takes seconds to import
            module = importlib.import_module(f"tools.train_tiny_k3.{module_name}")
            module.add_arguments(command)
    options = parser.parse_args()
    assert module is not None, "argparse refuses a command that is not in COMMANDS"
    try:
        module.run(options)
    except (FileNotFoundError, NotADirectoryError, EOFError, tarfile.TarError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
