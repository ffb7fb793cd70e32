"""Brings the arrays of a step to the device and its results back: packed in few copies, or not copied on a CPU.

Knows buffers, streams and events. Does not know what the arrays mean.
"""
