"""One forward: the batch on the device, the executors of the layers, graphs of decode steps, and the runner.

Knows slots and what a `ForwardInput` asks for. Does not decide what runs, and exchanges nothing with the manager.
"""
