"""Every block of the README runs, in the README's order, and prints what the README shows.

In the output, seconds and rates ("0.02 s, 193 MiB/s") are compared as "TIME"; everything else must be equal.
"""

from __future__ import annotations

import re
from pathlib import Path

import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.documents import ROOT, Block, Workshop, blocks_of, commands_of

TRAIN = """
import sys, torch
torch.save(torch.load("model.pt"), sys.stdout.buffer)
"""

IN_PLACE = """
import torch
expected = LlamaForCausalLM.from_pretrained("model")
tokens = torch.tensor([[1, 2, 3]])
assert torch.equal(model(tokens).logits, expected(tokens).logits)
assert {name for name, _ in model.named_parameters()} == set(state)
assert all(value.data_ptr() == state[name].data_ptr() for name, value in model.named_parameters())
"""
"""What has to hold after the README's program: the model computes with the bytes that the pack's tensors have."""


def make_shards(folder: Path) -> None:
    """A Llama of one layer in two shards, whose numbers are the same on every machine."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel()).reshape(parameter.shape)
            parameter.copy_(values % (13 + number) / 100)
    model.save_pretrained(folder, max_shard_size="2.2MB")


def without_times(text: str) -> str:
    return re.sub(r"\d[\d.,]* s, \d[\d.,]* [KMG]?i?B/s", "TIME", text)


def test_every_block_of_the_readme_runs_and_prints_what_is_shown(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path)
    make_shards(tmp_path / "model")
    embedding = torch.arange(64.0).reshape(16, 4)
    state = {"embedding.weight": embedding, "head.weight": embedding, "step": torch.tensor(7)}
    torch.save(state, tmp_path / "model.pt")
    # safetensors refuses tied tensors.
    alone = {"embedding.weight": embedding, "step": torch.tensor(7)}
    safetensors.torch.save_file(alone, tmp_path / "model.safetensors")
    (tmp_path / "train.py").write_text(TRAIN)
    for block in blocks_of("README.md"):
        if block.language != "console":
            after = IN_PLACE if "transformers" in block.text else ""
            workshop.run(Block(block.language, block.text + after))
            continue
        for command, shown in commands_of(block.text):
            printed = workshop.run(Block("console", command))
            assert without_times(printed) == without_times(shown), command
    assert {"model.pack", "trained.pack", "copy.pack"} <= {path.name for path in tmp_path.iterdir()}


def test_the_readme_is_short_and_shows_commands_their_output_and_a_program() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    languages = [block.language for block in blocks_of("README.md")]
    assert set(languages) == {"sh", "console", "python"}
    (console,) = [block for block in blocks_of("README.md") if block.language == "console"]
    words = [command.split()[1] for command, _ in commands_of(console.text)]
    assert words == ["convert", "inspect", "verify", "extract", "extract"]
