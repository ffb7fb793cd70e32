"""The flags of `toka top`."""

from tokasaurus.commands.running_server import AddressConfig
from tokasaurus.flags import flag, needs


class TopConfig(AddressConfig):
    """The flags of `toka top`, checked by `finalize`."""

    base_url: str | None = flag(None, "URL of the server, with or without /v1, replaces host and port")
    json: bool = flag(False, "print the samples as they come, one JSON object per line", heading="output")
    replay: str | None = flag(None, "show this recording, of json=T or of the server's record=, in place of a server")
    speed: float | None = flag(
        None,
        "recorded seconds that a replay shows per second",
        minimum=0.01,
        maximum=10_000,
        none_means="1, and without a terminal as fast as possible",
        rules=(needs("replay"),),
    )
