"""Texts in which the parser of tool calls finds calls, or almost."""

NAMES = frozenset({"f", "get_weather"})


FRAGMENTS = ["<tool_call>", "</tool_call>", "\n", " ", ";", "{", "}", '"name"', '"f"', '"get_weather"', '"g"', ":", ","]
