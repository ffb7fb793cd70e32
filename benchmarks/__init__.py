"""Benchmarks of this server and of comparable servers, in folders by subject. Not part of the installed package."""
