"""What a process says about itself: log lines, metrics, timings, traces, and its reason for ending.

Knows the figures that it is given. Does not know where they come from, and changes nothing.
"""
