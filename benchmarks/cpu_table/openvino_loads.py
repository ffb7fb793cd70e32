"""Runs loads with OpenVINO GenAI in this process, without HTTP: `openvino_loads.py MODEL.gguf REQUESTS.jsonl ...`

Belongs to another environment, one with openvino-genai: it imports nothing of this project. For each file of requests,
it prints {"tokens": number of tokens made, "seconds": time from the first request to the last answer}.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

_CACHE_GB = 4
_NUM_SEQUENCES = 512


def main(model: str, files: list[str]) -> None:
    settings = openvino_genai.SchedulerConfig()
    settings.cache_size = _CACHE_GB
    settings.max_num_seqs = _NUM_SEQUENCES
    settings.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, settings, "CPU")

    def run(requests: list[dict[str, object]]) -> int:
        """-> tokens made."""
        prompts, configs = [], []
        for request in requests:
            prompts.append(openvino.Tensor(np.array([request["prompt"]], np.int64)))
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = request["max_tokens"]
            config.ignore_eos = request["ignore_eos"]
            config.temperature = request["temperature"]
            config.do_sample = True
            configs.append(config)
        results = pipeline.generate(prompts, configs)
        return sum(len(tokens) for result in results for tokens in result.m_generation_ids)

    run([{"prompt": [80, 81], "max_tokens": 8, "ignore_eos": True, "temperature": 1.0}])  # warm-up
    for file in files:
        requests = [json.loads(line) for line in Path(file).read_text().splitlines()]
        began = time.perf_counter()
        tokens = run(requests)
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
