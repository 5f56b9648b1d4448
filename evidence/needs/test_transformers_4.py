"""
transformers 4 reads what quartet saves (which names it finds: evidence/tests/test_saving.py). It
lies in a folder of its own:

    pip install --target=FOLDER --no-deps "transformers<5" "huggingface_hub<1" "tokenizers<0.23"
    QUARTET_TRANSFORMERS_4=FOLDER python -m pytest evidence/needs/test_transformers_4.py
"""
import os
import subprocess
import sys

import pytest
import torch
from test_saving import saved_for_older

FOLDER = os.environ.get("QUARTET_TRANSFORMERS_4")
ASK = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    tokens, logits, text, ids = torch.load(f"{folder}/said.pt")
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits
    assert (found - logits).abs().max() < 1e-4, (folder, (found - logits).abs().max())
    found = AutoTokenizer.from_pretrained(folder)(text)
    assert found["input_ids"] == ids and "token_type_ids" not in found, (folder, found)
"""


@pytest.mark.skipif(not FOLDER, reason="QUARTET_TRANSFORMERS_4 names no folder")
@torch.no_grad()
def test_transformers_4_reads_the_same_model(tmp_path):
    tokens, folders = torch.arange(1, 25)[None] * 7 % 250, []
    for name, theirs in saved_for_older(tmp_path):
        folders.append(f"{tmp_path}/{name}")
        torch.save((tokens, theirs(tokens).logits, "a <think>b", [97, 32, 256, 98]),
                   f"{folders[-1]}/said.pt")
    asked = subprocess.run([sys.executable, "-c", ASK, *folders], capture_output=True, text=True,
                           env=os.environ | dict(PYTHONPATH=FOLDER), check=False)
    assert asked.returncode == 0, asked.stderr
