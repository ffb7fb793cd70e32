"""What the library costs beside the server."""
