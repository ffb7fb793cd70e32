"""What crosses between processes: frozen dataclasses, and the channels that carry them.

Knows the whole interface of the three processes. Does not know what any of them does, and imports no torch.
"""
