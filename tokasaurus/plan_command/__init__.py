"""`toka plan`: how a model's memory would be divided on a device, without the device and without its weights.

Knows flags, sizes and a checkpoint's headers. Loads no weights: the model worker's memory plan does the arithmetic.
"""
