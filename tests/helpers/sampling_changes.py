"""For each sampling parameter a value that changes what is sampled, as far as a sampler reads it."""

CHANGES: dict[str, float] = {
    "temperature": 0.3,
    "top_p": 0.3,
    "top_k": 2,
    "min_p": 0.5,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "repetition_penalty": 2.0,
}
