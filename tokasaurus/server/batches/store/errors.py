"""What can go wrong with a data directory."""


class StoreError(Exception):
    """The data directory cannot be read or written. The message is one line for the user."""


class StorageFull(StoreError):
    """The file system has no space left. What was to be written is not stored; nothing else is lost."""


class DataDirInUse(StoreError):
    """Another server uses the data directory."""


class ContentMissing(StoreError):
    """A file that is listed has no content: somebody deleted it from the data directory."""
