"""The flags of `toka top`."""

from collections.abc import Iterator

from tokasaurus.commands.running_server import AddressConfig, url_of_server
from tokasaurus.flags import flag


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
    )

    def further_errors(self) -> Iterator[str]:
        yield from super().further_errors()
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            yield f"base_url={self.base_url}: must begin with http:// or https://"
        if self.replay is None and self.speed is not None:
            yield f"speed={self.speed:g}: only of a replay="

    @property
    def url(self) -> str:
        """The server's URL for a client; without /v1."""
        return url_of_server(self).rstrip("/").removesuffix("/v1")

    @property
    def server_name(self) -> str:
        """The server's name in messages."""
        return self.url if self.unix_socket is None else f"unix_socket={self.unix_socket}"
