from tests.helpers.scripted_server import scripted_server

__all__ = ["scripted_server"]
