"""What others serve K3's operators with: one adapter a peer, each found on this machine or not.

An adapter imports what the peer's own package exports. vLLM, fla and humming may be installed, or
lie unpacked in a folder on ``PYTHONPATH``; this folder holds no line of theirs.
"""
