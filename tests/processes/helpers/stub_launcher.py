"""Runs the launcher with stub entries: the name of the worker's, then flags. GRACE_S: the grace periods, in seconds.
MACHINE: if set, a directory that describes the memory nodes of a simulated machine."""

import os
import sys
from functools import partial
from pathlib import Path

from tokasaurus.inherited import put_right

if __name__ == "__main__":  # and not where a child imports this module again, which has SIGINT blocked
    put_right()

from tokasaurus.config import ServerConfig
from tokasaurus.processes import launch
from tokasaurus.processes.launch import Entries, serve
from tokasaurus.processes.replica_places import place_replicas

if __name__ == "__main__":
    launch.SERVER_GRACE_S = launch.ENGINE_GRACE_S = float(os.environ["GRACE_S"])
    if "MACHINE" in os.environ:
        setattr(launch, "place_replicas", partial(place_replicas, root=Path(os.environ["MACHINE"])))  # noqa: B010
    entries = Entries("launch_stubs:run_server", "launch_stubs:run_manager", "launch_stubs:" + sys.argv[1])
    sys.exit(serve(ServerConfig.parse(sys.argv[2:]), entries))
