"""Time the kernels on a GPU: ``python -m benchmarks`` in the ``kernels`` folder."""
