"""Many replicas behind the router, simulated as discrete events: real managers and the real router, no model.

Knows how a replica, its device and its clients take turns on a clock of the simulation's own. The time of a step comes
from a fit to the steps of a real server, or from the estimates for a GPU.
"""
