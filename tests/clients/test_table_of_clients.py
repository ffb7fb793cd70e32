"""docs/clients.md lists the clients of in_environments.py, with versions that it installs."""

import re

from packaging.requirements import Requirement

from tests.clients.in_environments import ENVIRONMENTS, ROOT

BROUGHT_ALONG = {"openai"}
"""Clients that those of the environments require, in versions of their choice."""


def rows() -> dict[str, list[str]]:
    """Client -> its tested versions."""
    table = (ROOT / "docs" / "clients.md").read_text().partition("| client | versions |")[2]
    found = re.findall(r"^\| ([^-|][^|]*) \| ([\d., ]+) \|", table, flags=re.MULTILINE)
    return {name.partition(",")[0].lower(): versions.split(", ") for name, versions in found}


def test_every_environment_has_a_row_with_a_version_that_it_installs() -> None:
    shown = rows()
    for environment in ENVIRONMENTS:
        wanted = [Requirement(text) for text in environment.requirements]
        listed = [each for each in wanted if each.name.lower() in shown.keys() - BROUGHT_ALONG]
        assert listed or environment.npm_packages, f"docs/clients.md has no row for {environment.name}"
        for requirement in listed:
            versions = shown[requirement.name.lower()]
            assert all(map(requirement.specifier.contains, versions)), f"{requirement}: {versions}"
        for package in environment.npm_packages:
            name, _, version = package.rpartition("@")
            versions = shown.get(f"{name} for node", [])
            assert all(f"{each}.".startswith(f"{version}.") for each in versions), f"{package}: {versions}"


def test_every_row_is_a_client_of_an_environment() -> None:
    python = {Requirement(text).name.lower() for each in ENVIRONMENTS for text in each.requirements}
    node = {f"{package.rpartition('@')[0]} for node" for each in ENVIRONMENTS for package in each.npm_packages}
    assert set(rows()) <= python | node | BROUGHT_ALONG
