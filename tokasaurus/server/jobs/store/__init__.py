"""What batches keep on disk: a SQLite database, and the contents of files.

Knows rows, transactions and full disks. Does not know what a line means.
"""
