"""docs/clients.md shows what was recorded of every set of clients, and nothing else."""

from packaging.requirements import Requirement

from tests.clients.environments import ENVIRONMENTS, Environment
from tests.clients.in_environments import Installed
from tests.clients.table import Record, read_records, shown_table, table


def fits(environment: Environment, package: str, version: str) -> bool:
    """Whether the environment's requirements allow this version."""
    for text in environment.npm_packages:
        name, _, wanted = text.rpartition("@")
        if name == package:
            return f"{version}.".startswith(f"{wanted}.")
    wanted_python = [Requirement(text) for text in environment.requirements]
    return all(each.specifier.contains(version) for each in wanted_python if each.name == package)


def test_the_page_shows_the_table_of_the_records() -> None:
    """`python -m tests.clients.table` writes it."""
    assert shown_table() == table(read_records())


def test_what_is_recorded_is_of_versions_that_the_requirements_allow() -> None:
    records = read_records()
    known = {environment.name: environment for environment in ENVIRONMENTS}
    assert records.keys() <= known.keys()
    for name, record in records.items():
        environment, versions = known[name], record["versions"]
        assert versions.keys() == environment.clients.keys()
        for package, version in versions.items():
            assert fits(environment, package, version), f"{environment.name}: {package} {version}"


def test_environments_that_test_the_same_of_a_client_share_a_row() -> None:
    """With all their versions and the oldest day."""
    records: dict[str, Record] = {
        "openai-3": {"day": "2026-11-02", "versions": {"openai": "3.10"}},
        "openai-1": {"day": "2026-11-03", "versions": {"openai": "1.9"}},
    }
    lines = table(records).splitlines()[2:]
    assert len({(line.split()[1], line.partition("): ")[2]) for line in lines}) == len(lines)
    (openai,) = [line for line in lines if line.startswith("- openai ") and "Node" not in line]
    assert openai.startswith("- openai 1.9, 3.10 (2026-11-02): ")


def test_the_newest_versions_are_those_without_a_bound() -> None:
    for environment in ENVIRONMENTS:
        newest = Installed(environment, is_newest=True)
        names = [Requirement(text).name for text in environment.requirements]
        assert [Requirement(text).name for text in newest.requirements] == names
        assert not any(Requirement(text).specifier for text in newest.requirements)
        assert all(text.endswith("@latest") for text in newest.npm_packages)
        assert newest.directory != Installed(environment, is_newest=False).directory
