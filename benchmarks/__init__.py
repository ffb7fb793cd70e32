"""Measurements of this server and of its peers. Not part of the installed package."""
