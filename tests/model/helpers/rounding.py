"""Weights as they are quantised at load."""

from torch import Tensor


def rounded(numbers: Tensor, made: str) -> Tensor:
    """The weights [O, E], each as near as its scale allows."""
    if made == "int8":
        scale = numbers.abs().amax(1, keepdim=True) / 127
        return (numbers / scale).round() * scale
    groups = numbers.view(len(numbers), -1, 64)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = (high - low) / 15
    return (((groups - low) / scale).round() * scale + low).view_as(numbers)
