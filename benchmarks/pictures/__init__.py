"""SVG files for the documentation."""
