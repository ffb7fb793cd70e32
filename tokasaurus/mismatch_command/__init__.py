"""`toka mismatch`: how far log-probabilities of sampled tokens are from a trainer's.

Knows the library and a reference's forward. Does not know how either computes."""
