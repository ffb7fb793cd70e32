"""A sample of a manager, with everything that a replica without pipeline stages tells."""

from tokasaurus.messages.live import LiveBlocks, LiveEvents, LiveForecast, LiveNext, LiveOldRequest, LiveSample
from tokasaurus.messages.status import EngineStats, TimeLeft

STATS = EngineStats(5, 2, 30, 64, 100, 200, 3, 7, total_forward_seconds=10.0, num_running_background=1)
SAMPLE = LiveSample(
    stats=STATS,
    step=41,
    num_steps=9,
    round_seconds=0.0125,
    num_microbatches=1,
    num_slots=16,
    num_prefilling=1,
    blocks=LiveBlocks(total=64, own=20, shared=10, cached=14, free=20),
    events=LiveEvents(admitted=4, finished=3, preempted=2, evicted=1),
    forecast=LiveForecast(44, [0, 10, 11], [30, 33, 0], 33, 64),
    next=LiveNext(11, 12, 90, 3.25, "blocks"),
    oldest_wait_s=3.5,
    lengths=[(10, 12), (5, 5)],
    time_left=TimeLeft(4.04, 4.04),
    manager_seconds={"results": 0.02},
    busy_seconds=0.9,
    idle_seconds=0.05,
    phase_seconds=(0.5, 0.1, 0.0, 0.2, 0.1),
    oldest=(LiveOldRequest("cmpl-1", "alice", "running", 4, 3, 90, 1200, 500, 12.25, 0.5),),
)
