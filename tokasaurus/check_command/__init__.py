"""`toka check`: whether what computes a model here, kernels, compiled layers and graphs, gives what plain torch gives.

Knows the model worker's parts. Does not serve: no manager and no other process is started.
"""
