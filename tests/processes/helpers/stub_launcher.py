"""Runs the launcher with stub entries: the name of the worker's, then flags. GRACE_S: the grace periods, in seconds."""

import os
import sys

from tokasaurus.inherited import put_right

if __name__ == "__main__":  # and not where a child imports this module again, which has SIGINT blocked
    put_right()

from tokasaurus.config import ServerConfig
from tokasaurus.processes import launch
from tokasaurus.processes.launch import Entries, serve

if __name__ == "__main__":
    launch.SERVER_GRACE_S = launch.ENGINE_GRACE_S = float(os.environ["GRACE_S"])
    entries = Entries("launch_stubs:run_server", "launch_stubs:run_manager", "launch_stubs:" + sys.argv[1])
    sys.exit(serve(ServerConfig.parse(sys.argv[2:]), entries))
