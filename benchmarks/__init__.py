"""Benchmarks of this server and of comparable servers. Not part of the installed package."""
