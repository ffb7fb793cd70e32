"""This server on a GPU, with random weights: `python -m benchmarks.gpu --help`."""
