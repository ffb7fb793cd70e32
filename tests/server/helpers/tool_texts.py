"""Function names and text fragments: joined, the fragments form tool calls, or almost do."""

NAMES = frozenset({"f", "get_weather"})


FRAGMENTS = ["<tool_call>", "</tool_call>", "\n", " ", ";", "{", "}", '"name"', '"f"', '"get_weather"', '"g"', ":", ","]
