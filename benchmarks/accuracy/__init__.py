"""What quantised weights, and computing in 8 bits, cost in log-probabilities and perplexity."""
