"""The name that a client gives to a line. Imports nothing: the process that reads input files starts with it."""

MAX_CUSTOM_ID_CHARS = 512
