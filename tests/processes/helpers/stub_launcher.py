"""Runs the launcher with stub entries: the name of the worker's, then flags. GRACE_S: the grace periods, in seconds."""

import os
import sys

from tokasaurus.inherited import put_right

put_right()

from tokasaurus.config import ServerConfig  # noqa: E402
from tokasaurus.processes import launch  # noqa: E402
from tokasaurus.processes.launch import Entries, serve  # noqa: E402

if __name__ == "__main__":
    launch.SERVER_GRACE_S = launch.ENGINE_GRACE_S = float(os.environ["GRACE_S"])
    entries = Entries("launch_stubs:run_server", "launch_stubs:run_manager", "launch_stubs:" + sys.argv[1])
    sys.exit(serve(ServerConfig.parse(sys.argv[2:]), entries))
