"""Train the tiny K3 and its drafter on Python's standard library: see README.md here."""
