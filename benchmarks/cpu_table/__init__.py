"""Models of five sizes in three formats, on every server for CPUs that is at hand."""
