"""The documentation as a web site: `make docs`.

Knows which files of the project its pages are and their order (mkdocs.yml). Does not know what they say.
"""
