"""The CPU kernels: choosing an instruction set, building the C++ sources in `csrc`, and calling them.

Knows processors, compilers and the layouts of packed weights. Does not know the model's families or the scheduler.
"""
