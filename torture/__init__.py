"""Real servers under faults and loads at full size, measured. Not part of the installed package."""
