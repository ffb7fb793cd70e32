"""Files and batches of this server: against live requests, and their store alone."""
