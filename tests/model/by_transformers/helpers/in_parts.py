"""What becomes of each class that is divided among ranks: `python -m` writes the table that tests compare with."""

import gc
import json
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

from tests.model.by_transformers.helpers.every_class import NUM_TOKENS, RIGHT, TABLE, load_class
from tests.model.by_transformers.helpers.tiny_classes import VOCAB_SIZE, save_tiny_model, tiny_config
from tests.model.helpers.greedy_decoding import oracle_greedy, run_whole_prompt
from tokasaurus.model.by_transformers import probe
from tokasaurus.model.parallel.mesh import Mesh

IN_PARTS = Path(__file__).parents[1] / "in_parts.json"
MESHES = {"tp_size=2": (2, 1), "pp_size=2": (1, 2), "tp_size=2 pp_size=2": (2, 2)}
SERVED = tuple(family for family, each in json.loads(TABLE.read_text(encoding="utf-8")).items() if each == RIGHT)
"""By one rank."""


def outcomes(families: list[str], directory: Path) -> dict[str, dict[str, str]]:
    """By family, and by mesh: RIGHT, or why it is refused. Two processes have a tensor-parallel rank each; stages run
    one after another, with the tokens that transformers draws."""
    texts, expected = {}, {}
    for family in families:
        oracle = save_tiny_model(directory / family, tiny_config(family))
        prompt = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0)).tolist()
        tokens, _ = oracle_greedy(oracle, prompt, NUM_TOKENS)
        texts[family] = torch.tensor(prompt + tokens)
        with torch.inference_mode():
            expected[family] = oracle(texts[family].unsqueeze(0)).logits[0].log_softmax(dim=-1)
    torch.multiprocessing.spawn(_run_rank, args=(texts, directory), nprocs=2)  # type: ignore[attr-defined]
    found = {}
    for family in families:
        found[family] = dict[str, str]()
        for mesh, (tp_size, _) in MESHES.items():
            parts = [torch.load(directory / family / f"{mesh} {rank}.pt") for rank in range(tp_size)]
            refused = next((part for part in parts if isinstance(part, str)), None)
            if refused is None:
                logprobs = torch.cat(parts, dim=1).log_softmax(dim=-1)
                torch.testing.assert_close(logprobs, expected[family], atol=1e-4, rtol=0, msg=f"{family}, {mesh}")
                drawn = logprobs[-NUM_TOKENS - 1 : -1].argmax(dim=-1)
                assert torch.equal(drawn, texts[family][-NUM_TOKENS:]), f"{family}, {mesh}"
            found[family][mesh] = refused or RIGHT
    return found


def _run_rank(rank: int, texts: dict[str, Tensor], directory: Path) -> None:
    """In a process of its own: saves the logits of its token ids, or why there are none."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rendezvous = f"file://{directory / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    for family, token_ids in texts.items():
        for name, (tp_size, _) in MESHES.items():
            if rank < tp_size:
                _save_logits(directory / family, name, rank, token_ids)
    torch.distributed.destroy_process_group()
    gc.collect()  # modules in cycles have the group, whose threads abort a process that ends while they free a tensor


def _save_logits(directory: Path, name: str, rank: int, token_ids: Tensor) -> None:
    tp_size, pp_size = MESHES[name]
    group = torch.distributed.group.WORLD if tp_size > 1 else None
    meshes = [Mesh(stage, pp_size, rank, tp_size, group) for stage in range(pp_size)]
    torch.save(_logits(directory, meshes, token_ids), directory / f"{name} {rank}.pt")


def _logits(directory: Path, stages: list[Mesh], token_ids: Tensor) -> Tensor | str:
    """logits [T, v] by all stages, or why the first of them that is refused is so."""
    with patch("tokasaurus.checkpoint.info.read_facts", probe.facts_of):
        try:
            loaded = [(*load_class(directory, mesh=mesh), mesh) for mesh in stages]
        except ValueError as error:
            return str(error)
    hidden: Tensor | None = None
    for model, info, mesh in loaded:
        hidden = run_whole_prompt(model, info, mesh, hidden, token_ids)
    assert hidden is not None
    return hidden


def main() -> None:
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        table = outcomes(sys.argv[1:] or [*SERVED], Path(directory))
    print(json.dumps(table, indent=1))
    if not sys.argv[1:]:
        IN_PARTS.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
