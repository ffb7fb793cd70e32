"""`toka mismatch`: how far log-probabilities of sampled tokens are from those of a trainer's forward.

Knows the library and a reference's forward. Does not know how either computes."""
